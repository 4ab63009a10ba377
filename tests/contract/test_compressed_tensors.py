"""Our compressed-tensors folders in transformers with the compressed-tensors package itself, on a CPU.

Neither needs the other's code: the package decodes, we decode, and both compute the same fp32 products in transformers'
class, so logits are compared exactly. `pip install compressed-tensors` (0.20.1 was tried), then
`pytest -m slow tests/contract/test_compressed_tensors.py`.
"""

import pytest
import torch

from megafp8.convert.by_layer import our_logits
from megafp8.convert.fp8_folder import Options, to_quantized
from megafp8.convert.fp8_inputs import Inputs
from megafp8.convert.fp8_read import read_quantized
from megafp8.convert.fp8_verify import as_ours, decoded_model
from megafp8.convert.source import open_source
from megafp8.convert.verify_hf import logit_bound, sample_ids
from megafp8.data.tokenizer import load_tokenizer
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
        read = as_ours(decoded, model.config)
        mine, exact = (our_logits(model.config, read, ids, dtype) for dtype in (torch.float32, torch.float64))
        bound = logit_bound(exact, mine)
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = load(out, quantization_config=dense)(ids).logits[0].double()
    assert float((theirs - mine).abs().max()) <= bound
    plain = decoded_model(transformers, decoded)
    assert torch.equal(theirs, plain.logits(ids, torch.float32))
    if name in ("mixtral", "qwen3_moe", "deepseek"):
        return  # without dequantize=True the package leaves fused experts as codes, and scales 4-d inputs as one
    rounded = plain.logits(ids, torch.float32, Inputs(decoded).within)  # a scale for each token
    assert torch.equal(load(out)(ids).logits[0].double(), rounded)
