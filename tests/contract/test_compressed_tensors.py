"""Our compressed-tensors folders in transformers with the compressed-tensors package itself, on a CPU.

Neither needs the other's code: the package decodes, we decode, and both compute the same fp32 products in transformers'
class, so logits are compared exactly. `pip install compressed-tensors` (0.20.1 was tried), then
`pytest -m slow tests/contract/test_compressed_tensors.py`.
"""

import pytest
import torch

from megafp8.convert.fp8_folder import Options, to_quantized
from megafp8.convert.fp8_inputs import rounded_inputs
from megafp8.convert.fp8_read import read_quantized
from megafp8.convert.fp8_verify import _as_ours, _served
from megafp8.convert.source import open_source
from megafp8.convert.verify_hf import logit_bound, sample_ids
from megafp8.data.tokenizer import load_tokenizer
from megafp8.infer.weights import build_model, in_dtype
from tests.unit.convert.test_quantized import MODELS
from tests.unit.infer.models import save_model

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow
NAMES = [name for name in MODELS if name != "gpt"]


def load(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **more).eval()


@pytest.fixture(params=NAMES)
def made(request, tmp_path):
    source = save_model(tmp_path / "run", MODELS[request.param])
    to_quantized(source, tmp_path / "out", Options("compressed-tensors"))
    return request.param, source, tmp_path / "out"


@torch.inference_mode()
def test_the_package_reads_what_we_wrote(made):
    name, source, out = made
    decoded = read_quantized(out)
    with open_source(source) as model:
        ids = sample_ids(model.config, load_tokenizer(model.tokenizer()))
        ours = _as_ours(decoded, model)
        dtypes = (torch.float32, torch.float64)
        mine, exact = (build_model(model.config, in_dtype(ours, dtype))(ids)[0].double() for dtype in dtypes)
        bound = logit_bound(exact, mine)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = load(out, quantization_config=dense)(ids).logits
    assert float((theirs[0].double() - mine).abs().max()) <= bound
    with _served(transformers, out, decoded) as plain:
        assert torch.equal(theirs, plain(ids).logits)
        if name in ("mixtral", "qwen3_moe", "deepseek"):
            return  # without dequantize=True the package leaves fused experts as codes, and scales 4-d inputs as one
        with rounded_inputs(plain, decoded):
            assert torch.equal(load(out)(ids).logits, plain(ids).logits)  # inputs rounded, a scale for each token
