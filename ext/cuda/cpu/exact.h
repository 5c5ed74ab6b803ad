// To be included first: behind it no product is contracted with a sum, so that every instruction set gives the same bits.

#pragma once

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif
