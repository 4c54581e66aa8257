"""The GPU check: kernels against the oracle and the roofline, then `baton serve` with P and D on one GPU.

    python -m benchmarks.gpu [--model PATH] [--skip-serve]

Prints one table in Markdown, and a sentence per thing that is wrong, with status 1. Takes some minutes, most
of them for compiling kernels. Needs a CUDA build of torch, Triton, httpx, and NIXL for the second part.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

LIMIT_S = 480.0
"""What no run may take: by then it gives up what is left. One kernel that hangs is not seen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="", help="for the serving part; default: the embedded model")
    parser.add_argument("--skip-serve", action="store_true", help="kernels only")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"benchmarks.gpu: torch {torch.__version__} finds no CUDA device here; nothing was checked")
    deadline = time.monotonic() + LIMIT_S
    wrong = check_kernels(torch.device("cuda", torch.cuda.current_device()), deadline)
    if not given.skip_serve:
        from benchmarks.gpu_serve import check_serve  # its processes need the memory that is free by now

        torch.cuda.empty_cache()
        wrong += check_serve(given.model, deadline)
    for sentence in wrong:
        print(f"WRONG: {sentence}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


def check_kernels(device: torch.device, deadline: float) -> list[str]:
    """Print the kernels' rows; a sentence for each that differs from its twin, and when the time is over.

    `deadline`: in `time.monotonic()`.
    """
    from benchmarks.gpu_attention import attention_cases
    from benchmarks.gpu_kernels import kernel_cases
    from benchmarks.gpu_roofline import TOLERANCE, measure, measure_ceilings

    ceilings, wrong = measure_ceilings(device), []
    name = torch.cuda.get_device_name(device)
    print(f"{name}, torch {torch.__version__}: copies reach {ceilings.copy_bytes_s / 1e9:.0f} GB/s, "
          f"bf16 products {ceilings.matmul_flop_s / 1e12:.0f} TFLOP/s\n")  # fmt: skip
    print("| kernel | shape | ms | reaches | of ceiling | torch, ms | torch / ours | error |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for cases in (kernel_cases, attention_cases):
        for case in cases(device):
            if time.monotonic() > deadline:
                return [
                    *wrong,
                    f"the time is over before {case.kernel} ({case.shape}); the rest was not checked",
                ]
            row = measure(case, ceilings)
            rival = f"{row.rival_ms:.3f} | {row.rival_ms / row.ms:.2f}" if row.rival_ms else "- | -"
            print(
                f"| {row.kernel} | {row.shape} | {row.ms:.3f} | {row.reached} | {row.share:.0%} "
                f"| {rival} | {row.error:.4f} |",
                flush=True,
            )
            if not row.is_right:
                wrong.append(
                    f"{row.kernel} ({row.shape}) is {row.error:.3g} from its twin; allowed is {TOLERANCE}"
                )
    print()
    return wrong


if __name__ == "__main__":
    main()
