"""`megafp8 convert`: our checkpoints to foreign formats and back, verified."""

from __future__ import annotations

import argparse
import os
from typing import Any

from megafp8.core.errors import ConfigError

HELP = "convert a checkpoint to or from a Hugging Face folder, and verify what was written"
EPILOG = """examples:
  megafp8 convert --to hf runs/tiny-fp8 exports/tiny-hf             newest complete checkpoint of a run, BF16
  megafp8 convert --to hf runs/big/checkpoints/step_00010000 out --dtype fp32
  megafp8 convert --to modelopt runs/tiny-fp8 exports/tiny-fp8      FP8 with the run's own activation scales
  megafp8 convert --to modelopt RUN OUT --quant nvfp4 --kv-cache fp8 --calibrate data/en/valid --samples 256
  megafp8 convert --to trtllm RUN OUT --tp 4 --pp 2 --quant fp8     native TensorRT-LLM, for engines up to 1.2
  megafp8 convert --from hf ~/models/Llama-3-8B runs/init           weights only, for continued pretraining
  megafp8 convert --from megatron RUN runs/init --vocab-size 50257  torch_dist, weights only
  megafp8 convert --to megatron RUN OUT                             OUT/release, for Megatron's --load OUT

The result is written beside OUT and renamed when it is complete and verified: reloaded with transformers, logits and
tokenizer ids compared with ours. Exit code 4 if they differ by more than rounding explains; then nothing is left.
A conversion that is interrupted goes on where it was when the same command is given again."""

# format -> the options that it has beside --workers and --no-verify
_QUANTIZED = ("dtype", "tokenizer", "quant", "kv_cache", "calibrate", "samples", "percentile")
_USES: dict[str, tuple[str, ...]] = {
    "--to hf": ("dtype", "tokenizer"),
    "--to modelopt": _QUANTIZED,
    "--to compressed-tensors": _QUANTIZED,
    "--to trtllm": (*_QUANTIZED, "tp", "pp", "moe_ep", "compat"),
    "--to megatron": ("dtype",),
    "--from hf": (),
    "--from megatron": ("tokenizer", "model_config", "vocab_size"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    way = parser.add_mutually_exclusive_group(required=True)
    formats = ("hf", "modelopt", "compressed-tensors", "trtllm", "megatron")
    way.add_argument("--to", choices=formats, help="write this format")
    way.add_argument("--from", choices=("hf", "megatron"), dest="source_format", help="read this format")
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint, a run's folder, or (--from) a foreign folder")
    parser.add_argument("out", metavar="OUT", help="the folder to write; must not exist or be empty")
    parser.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), help="of the weights (--to; default bf16)")
    parser.add_argument("--quant", metavar="SCHEME", help="modelopt: fp8, fp8-block, nvfp4; trtllm: none, fp8")
    parser.add_argument("--tp", type=int, metavar="N", help="trtllm: ranks that share each layer (default 1)")
    parser.add_argument("--pp", type=int, metavar="N", help="trtllm: stages (default 1)")
    parser.add_argument("--moe-ep", type=int, metavar="N", help="trtllm: groups of tp ranks that share out experts")
    parser.add_argument("--compat", metavar="RELEASE", help="trtllm: 1.2 (default) or 0.13")
    parser.add_argument("--kv-cache", choices=("none", "fp8"), help="scales of keys and values too")
    parser.add_argument("--calibrate", metavar="CORPUS", help="take activation scales from this .bin/.idx or text file")
    parser.add_argument("--samples", type=int, metavar="N", help="of the corpus (default 128)")
    parser.add_argument("--percentile", type=float, metavar="P", help="below 100 clips outliers")
    parser.add_argument("--tokenizer", metavar="PATH", help="its file, if it has moved since training")
    parser.add_argument("--model-config", metavar="TOML", help="--from megatron: its [model] describes it")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="--from megatron: tokens without padding")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="threads; 0: as many as cores, at most 8")
    parser.add_argument("--no-verify", action="store_true", help="do not reload and compare (needs no transformers)")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what the comparison found."""
    # PyTorch asks at its first allocation: large pages spare most page faults of buffers that live for one tensor
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from megafp8.convert.hf import from_hf, to_hf

    if args.workers < 0:
        raise ConfigError(f"--workers {args.workers}: at least one thread is needed; nearest: 1, or 0 for all cores")
    _refuse_unused(args)
    if args.source_format == "hf":
        path = from_hf(args.source, args.out, verify=not args.no_verify, workers=args.workers, say=print)
        print(f"{path}: written, {'not ' * args.no_verify}verified; weights only")
        return 0
    if "megatron" in (args.source_format, args.to):
        return _megatron(args)
    if args.to != "hf":
        return _quantized(args)
    to_hf(
        args.source,
        args.out,
        dtype=args.dtype or "bf16",
        tokenizer=args.tokenizer,
        verify=not args.no_verify,
        workers=args.workers,
        say=print,
    )
    return 0


def _megatron(args: argparse.Namespace) -> int:
    if args.to:
        from megafp8.convert.megatron_out import to_megatron

        verify = not args.no_verify
        to_megatron(args.source, args.out, dtype=args.dtype or "bf16", verify=verify, workers=args.workers, say=print)
        return 0
    from megafp8.convert.megatron_in import from_megatron

    path = from_megatron(
        args.source,
        args.out,
        model_config=args.model_config,
        vocab_size=args.vocab_size,
        tokenizer=args.tokenizer,
        verify=not args.no_verify,
        workers=args.workers,
        say=print,
    )
    print(f"{path}: written, {'not ' * args.no_verify}verified; weights only")
    return 0


def _quantized(args: argparse.Namespace) -> int:
    from megafp8.convert.fp8_folder import Options, to_quantized
    from megafp8.convert.scales import Calibration

    samples = 128 if args.samples is None else args.samples
    percentile = 100.0 if args.percentile is None else args.percentile
    calibration = Calibration(args.calibrate, samples, percentile) if args.calibrate else None
    if args.to == "trtllm":
        return _native(args, calibration)
    options = Options(args.to, args.quant or "", args.kv_cache == "fp8", calibration, args.dtype or "bf16")
    to_quantized(
        args.source,
        args.out,
        options,
        tokenizer=args.tokenizer,
        verify=not args.no_verify,
        workers=args.workers,
        say=print,
    )
    return 0


def _native(args: argparse.Namespace, calibration: Any) -> int:
    from megafp8.convert.trtllm import to_trtllm
    from megafp8.convert.trtllm_config import Target

    if args.quant not in (None, "none", "fp8"):
        raise ConfigError(f"--quant {args.quant}: native checkpoints are written in none (BF16) or fp8")
    tp, pp, moe_ep = (1 if size is None else int(size) for size in (args.tp, args.pp, args.moe_ep))
    to_trtllm(
        args.source,
        args.out,
        Target(tp, pp, moe_ep, args.compat or "1.2"),
        fp8=args.quant == "fp8",
        kv_cache=args.kv_cache == "fp8",
        calibration=calibration,
        dtype=args.dtype or "bf16",
        tokenizer=args.tokenizer,
        verify=not args.no_verify,
        workers=args.workers,
        say=print,
    )
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    """An option that does not go with the format is refused, not passed over."""
    way = f"--to {args.to}" if args.to else f"--from {args.source_format}"
    given = [name for uses in _USES.values() for name in uses if getattr(args, name) is not None]
    wrong = [f"--{name.replace('_', '-')}" for name in dict.fromkeys(given) if name not in _USES[way]]
    if wrong:
        fitting = ", ".join(f"--{name.replace('_', '-')}" for name in _USES[way]) or "none"
        raise ConfigError(f"{', '.join(wrong)} does not go with {way}; options of its own: {fitting}")
