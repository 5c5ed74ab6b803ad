"""What the command line is made of: `script` reads the step, `machine` says what it is planned for, `report` tells and
writes the plan.
"""
