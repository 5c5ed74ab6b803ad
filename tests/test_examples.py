"""The scripts of examples/ do what they say, run as their users run them."""

import contextlib
import importlib.util
import io
import json
import multiprocessing
import runpy
import signal
import subprocess
import sys
import types
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import colofunc as cf

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A script of examples/ as a module."""
    found = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, name, module)
    found.loader.exec_module(module)
    return module


def test_a_vision_transformer_learns_to_read_digits(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("sklearn")
    assert script("train_vit", monkeypatch).main(["--dp", "2", "--tp", "1"]) > 0.95
    assert capsys.readouterr().out.count("right on unseen digits") == 20


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads((EXAMPLES / "simulated_ranks.ipynb").read_text())["cells"]
    module = types.ModuleType("simulated_ranks")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    threads = torch.get_num_threads()
    for n, cell in enumerate(cells):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {n}", "exec"), module.__dict__)
    torch.set_num_threads(threads)
    assert "Megatron column/row" in capsys.readouterr().out
    assert module.checked.leaves > 10 and module.checked.worst < 1e-10
    assert abs(float(module.sharded_loss) - float(module.loss)) < 1e-5


@pytest.fixture
def tiny_lm(tmp_path: Path) -> tuple[str, ...]:
    """Arguments of finetune_lm.py for a small GPT-2 (with dropout) in a folder and a text."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    sizes = "--length 32 --batch 4 --lr 1e-3 --steps 8 --save-every 1"
    return ("--model", str(tmp_path / "model"), "--data", str(tmp_path / "*.txt"), *sizes.split())


@pytest.mark.sweep  # with its state on disk one is killed by default
def test_a_fine_tuning_that_is_killed_goes_on_bit_for_bit(tiny_lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = script("finetune_lm", monkeypatch).main
    whole = main([*tiny_lm, "--out", str(tmp_path / "whole")])
    command = [sys.executable, str(EXAMPLES / "finetune_lm.py"), *tiny_lm, "--out", str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        for line in run.stdout:
            if line.startswith("step 4"):
                run.kill()
                break
    assert run.wait() == -signal.SIGKILL and not (tmp_path / "killed" / "model").exists()
    rest = main([*tiny_lm, "--out", str(tmp_path / "killed")])
    assert 2 <= len(rest) < 8 and rest == whole[-len(rest) :]
    a, b = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "killed"))
    assert a == b
    from_pretrained = pytest.importorskip("transformers").AutoModelForCausalLM.from_pretrained
    ids = torch.tensor([list((tmp_path / "text.txt").read_bytes()[:32])])
    with torch.no_grad():
        before, after = (from_pretrained(folder).eval()(ids, labels=ids).loss for folder in (tiny_lm[1], tmp_path / "whole" / "model"))
    assert after < before - 0.1


class Sent(io.TextIOBase):
    """Lines that are printed, sent one by one."""

    def __init__(self, to: Connection) -> None:
        self.to = to

    def write(self, text: str) -> int:
        self.to.send(text)
        return len(text)


def finetune(arguments: list[str], end: Connection) -> None:
    """finetune_lm.py in a process of its own; what it prints goes to `end`, and then None."""
    with contextlib.redirect_stdout(Sent(end)):
        runpy.run_path(str(EXAMPLES / "finetune_lm.py"))["main"](arguments)
    end.send(None)


@pytest.mark.dist  # from the server of warm processes; the test above starts the script as its users do
def test_with_its_state_on_disk_the_losses_are_the_same_also_behind_a_kill(
    tiny_lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, nvme = script("finetune_lm", monkeypatch).main, tmp_path / "nvme"
    nvme.mkdir()
    sizes = (*tiny_lm, "--dp", "1", "--tp", "1")
    whole = main([*sizes, "--out", str(tmp_path / "whole")])
    context = multiprocessing.get_context("forkserver")
    printed, end = context.Pipe(duplex=False)
    run = context.Process(target=finetune, args=([*sizes, "--disk", str(nvme), "--out", str(tmp_path / "killed")], end))
    run.start()
    end.close()
    for line in iter(printed.recv, None):
        if line.startswith("step 4"):
            left = [path.name for path in nvme.iterdir()]
            run.kill()
            break
    run.join()
    assert run.exitcode == -signal.SIGKILL and left  # its files lie there until the next one comes
    rest = main([*sizes, "--disk", str(nvme), "--out", str(tmp_path / "killed")])
    assert 2 <= len(rest) < 8 and rest == whole[-len(rest) :]
    a, b = ((tmp_path / run / "model" / "model.safetensors").read_bytes() for run in ("whole", "killed"))
    assert a == b and not set(left) & {path.name for path in nvme.iterdir()}


def test_a_long_context_over_ring_and_zero(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice the tokens on twice the ranks leave a rank's peak where it was: weights are split further, activations equal."""
    pytest.importorskip("transformers")
    sizes = ["--tokens", "64", "--width", "16", "--steps", "3", "--longer", "2"]
    assert script("long_context", monkeypatch).main(sizes) < 3.6  # log 32 is 3.47
    out = capsys.readouterr().out
    assert "cp: context parallel (striped)" in out and "dp: ZeRO-3" in out
    peaks = [float(line.split("peak ")[1].split()[0]) for line in out.splitlines() if "peak" in line and "tokens on" in line]
    assert len(peaks) == 2 and peaks[1] <= peaks[0]


def test_a_fine_tuning_within_a_third_of_the_memory_has_the_same_losses(tiny_lm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=6, n_embd=64, n_head=2, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tiny_lm[1])
    main, peaks, call = script("finetune_lm", monkeypatch).main, [], cf.Staged.__call__

    def counted(step, *args):
        peaks.append(step.lower(*args).memory().peak_bytes["device"])
        return call(step, *args)

    monkeypatch.setattr(cf.Staged, "__call__", counted)
    one = (*tiny_lm, "--dp", "1", "--tp", "1", "--batch", "2", "--steps", "2", "--save-every", "2", "--out")
    whole = main([*one, str(tmp_path / "whole")])
    budget = peaks[0] // 3
    lean = main([*one, str(tmp_path / "lean"), "--budget", str(budget)])
    assert peaks[-1] <= budget and all(abs(a - b) < 1e-4 for a, b in zip(lean, whole, strict=True))


def test_a_pipeline_with_tensor_parallelism_zero_and_experts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    first, last = script("pipeline_moe", monkeypatch).main(["--layers", "2", "--steps", "8", "--schedule", "zb-h1"])
    assert last < first
    out = capsys.readouterr().out
    assert "pp: pipeline of 2 stages, zb-h1, 4 microbatches, bubble " in out
    assert "dp: expert parallel" in out and "tp: Megatron column/row" in out
    assert "rank 0  0FF" in out and "rank 1  " in out


@pytest.mark.dist
@pytest.mark.sweep
def test_a_pipeline_on_real_ranks_prints_the_losses_of_simulated_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subprocess_env: dict[str, str]
) -> None:
    """Eight ranks, as the file's first lines say."""
    pytest.importorskip("transformers")
    arguments = ["--layers", "2", "--steps", "11"]
    script("pipeline_moe", monkeypatch).main(arguments)
    simulated = capsys.readouterr().out
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "8"]
    command = [*torchrun, str(EXAMPLES / "pipeline_moe.py"), *arguments]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    trained = [[line for line in out.splitlines() if line.startswith("step ")] for out in (done.stdout, simulated)]
    assert trained[0] == trained[1] and len(trained[0]) == 2


SMALL_QLORA = ("--width", "64", "--first", "20", "--steps", "20", "--length", "32")


def test_qlora_learns_as_adapters_of_the_whole_model_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Within a hundredth of a bit, with a quarter of the frozen bytes or less and a lower peak; the adapters go into a folder."""
    pytest.importorskip("transformers")
    found = script("qlora", monkeypatch).main([*SMALL_QLORA, "--out", str(tmp_path / "adapters")])
    wide, narrow = found[""], found["nf4"]
    assert narrow.after < narrow.before - 0.2 and abs(narrow.after - wide.after) < 0.02
    assert narrow.frozen_bytes < 0.5 * wide.frozen_bytes and narrow.peak_bytes < wide.peak_bytes
    assert (tmp_path / "adapters" / "adapter_model.safetensors").exists()


def losses(out: str) -> list[str]:
    """What examples/qlora.py prints without peaks, which are those of another plan on another machine."""
    return [line.split("peak")[0].strip() for line in out.splitlines() if line]


@pytest.fixture
def tiny_llama(tmp_path: Path) -> tuple[str, ...]:
    """Arguments of qlora.py for a small LLaMA in a folder, with a tokenizer of characters, and a text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, bos_token_id=0, eos_token_id=0
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({chr(n): n for n in range(128)}, unk_token="?"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=characters).save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(Path(__file__).read_text())
    sizes = "--length 32 --steps 4 --precision bf16"
    return ("--model", str(tmp_path / "model"), "--data", str(tmp_path / "*.txt"), *sizes.split())


@pytest.mark.dist
@pytest.mark.sweep
@pytest.mark.parametrize("of_a_folder", [False, True])
def test_qlora_on_real_ranks_prints_what_simulated_ones_do(
    of_a_folder: bool, tiny_llama, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], subprocess_env: dict[str, str]
) -> None:
    arguments = tiny_llama if of_a_folder else SMALL_QLORA
    script("qlora", monkeypatch).main(arguments)
    simulated = capsys.readouterr().out
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(EXAMPLES / "qlora.py"), *arguments]
    done = subprocess.run(command, env=subprocess_env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses(done.stdout) == losses(simulated) and "nf4" in simulated
