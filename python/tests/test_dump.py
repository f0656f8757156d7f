# SPDX-License-Identifier: Apache-2.0
"""winnow.dump, winnow.dump_call and the program's `compare`, which reads what they write."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from cases import bf16, f32
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_ops import SCALE, TOKENS, TOPK, V_DIM, Inputs, calls

import winnow
from winnow import _lib

TOOL = Path(_lib.path).with_name("winnow")
needs_tool = pytest.mark.skipif(not TOOL.exists(), reason="this build has no tool")
OPERATOR = "sparse_attention_forward"


def compare(file: Path, *words: str) -> tuple[int, dict]:
    """The exit code of `winnow compare` and the JSON that it printed."""
    ran = subprocess.run([TOOL, "compare", file, "--json", *words], capture_output=True, text=True)
    assert not ran.stderr, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


def refusal(file: Path) -> str:
    ran = subprocess.run([TOOL, "compare", file], capture_output=True, text=True)
    assert ran.returncode == 1 and not ran.stdout
    return ran.stderr


def metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


def attention(x: Inputs) -> tuple:
    return x.q, x.kv, x.indices, x.lengths, x.sink, V_DIM, SCALE


def test_a_file_holds_inputs_outputs_and_options(tmp_path):
    x = Inputs(bf16)
    with winnow.dump(tmp_path / "job.safetensors", OPERATOR) as dump:
        call = (torch.ops.winnow.sparse_attention_forward, *attention(x))
        out, lse, _ = call[0](*call[1:], backend="cpu")
    [choice] = winnow.explain(*call, backend="cpu").operators
    assert dump.files == [tmp_path / "job.safetensors"]
    stored = load_file(dump.files[0])
    expected = {"q": x.q, "kv": x.kv, "indices": x.indices, "lengths": x.lengths, "sink": x.sink}
    expected |= {"out": out, "lse": lse}
    assert set(stored) == set(expected)
    for name, tensor in expected.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor), name
    said = metadata(dump.files[0])
    assert said["winnow_operator"] == OPERATOR and said["scale"] == str(SCALE)
    assert said["winnow_ran_on"] == f"cpu, {choice.kernel}"
    assert said["winnow_version"] == winnow.__version__


@pytest.mark.parametrize("by_switch", [True, False])
def test_the_kernel_named_is_that_of_the_call_s_own_execution(tmp_path, monkeypatch, by_switch):
    asked = []
    explain = _lib.explain

    def recorded(op, execution, **fields):
        asked.append(execution)
        return explain(op, execution, **fields)

    monkeypatch.setattr(_lib, "explain", recorded)
    torch.use_deterministic_algorithms(by_switch)
    try:
        with winnow.dump(tmp_path / "job.safetensors", "quantize_fp8"):
            torch.ops.winnow.quantize_fp8(torch.ones(2, 8), deterministic=not by_switch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [_lib.execution(deterministic=True, threads=torch.get_num_threads())]


def test_each_operator_of_a_layer_gets_a_file(tmp_path):
    x = Inputs(f32)
    q, kv = (t.clone().requires_grad_() for t in (x.q, x.kv))
    with winnow.dump(tmp_path / "step.safetensors") as dump:
        for _ in range(2):
            out, _, _ = winnow.sparse_attention(q, kv, x.indices, v_dim=V_DIM, scale=SCALE)
            out.sum().backward()
    names = [
        "step.sparse_attention_forward.safetensors",
        "step.sparse_attention_backward.safetensors",
    ]
    assert [file.name for file in dump.files] == names
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names)  # and no other


def test_a_later_call_can_be_asked_for(tmp_path):
    x = Inputs(f32)
    with winnow.dump(tmp_path / "second.safetensors", "index_loss", call=1) as dump:
        for factor in (1, 2, 3):
            torch.ops.winnow.index_loss(x.indices, None, factor * x.scores, x.target)
    assert len(dump.files) == 1
    assert torch.equal(load_file(dump.files[0])["scores"], 2 * x.scores)


def test_a_failed_write_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    file = tmp_path / "job.safetensors"
    file.write_text("before")

    def refuse(*paths):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="no"), winnow.dump(file, "quantize_fp8"):
        torch.ops.winnow.quantize_fp8(torch.ones(2, 8))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]
    assert file.read_text() == "before"


def test_bad_words_are_refused_by_name(tmp_path):
    file = tmp_path / "x"
    with pytest.raises(ValueError, match="operator 'attention': must be one of key_windows"):
        winnow.dump(file, "attention")
    with pytest.raises(FileNotFoundError, match="path '/none/x': must be a file in a folder"):
        winnow.dump("/none/x")
    with pytest.raises(FileNotFoundError, match="path '': must be a file in a folder"):
        winnow.dump("")
    with pytest.raises(IsADirectoryError, match="path '.*': must be a file, not a folder"):
        winnow.dump(tmp_path)
    with pytest.raises(ValueError, match="call -1: must be at least 0"):
        winnow.dump(file, call=-1)
    with pytest.raises(ValueError, match="operator 'attention': must be one of"):
        winnow.dump_call(file, "attention")
    x = Inputs(f32)
    with pytest.raises(TypeError, match="index_loss needs target"):
        winnow.dump_call(file, "index_loss", indices=x.indices, scores=x.scores)
    with pytest.raises(TypeError, match="quantize_fp8 has no y"):
        winnow.dump_call(file, "quantize_fp8", x=x.q, y=x.q)
    loss = {"indices": x.indices, "scores": x.scores, "target": x.target}
    with pytest.raises(ValueError, match=r"indices torch.int64: must be one of .*torch.int32"):
        winnow.dump_call(file, "index_loss", **loss | {"indices": x.indices.long()})
    with pytest.raises(ValueError, match="index_loss: loss list: must be a tensor"):
        winnow.dump_call(file, "index_loss", **loss, loss=[0.0])
    assert not file.exists()


@needs_tool
def test_every_operator_can_be_dumped_and_compared(tmp_path):
    for dtype in (bf16, f32):
        for name, examples in calls(Inputs(dtype)).items():
            for i, args in enumerate(examples):
                file = tmp_path / f"{name}-{i}.safetensors"
                with winnow.dump(file, winnow.ops._calls[name][0]):
                    getattr(torch.ops.winnow, name)(*args)
                code, said = compare(file)
                assert code == 0 and said["ok"], json.dumps(said, indent=1)
                ran = [each["contender"] for each in said["contenders"] if "outputs" in each]
                assert set(ran) >= {"reference", "cpu", "file"}
                assert said["compared_rows"] == said["query_rows"]


@needs_tool
def test_a_call_need_not_be_made(tmp_path):
    x = Inputs(bf16)
    file = tmp_path / "job.safetensors"
    names = dict(zip(("q", "kv", "indices", "lengths", "sink"), attention(x)[:5], strict=True))
    winnow.dump_call(file, OPERATOR, **names, v_dim=V_DIM, scale=SCALE)
    assert metadata(file)["out"] == f"BF16[{TOKENS}, 3, {V_DIM}]"
    code, said = compare(file)
    contenders = {each["contender"] for each in said["contenders"]}
    assert code == 0 and contenders == {"reference", "cpu", "cuda"}
    assert list(said)[:3] == ["schema", "command", "version"] and said["command"] == "compare"
    page = (Path(__file__).parents[2] / "docs" / "tool.md").read_text()
    assert all(f"`{member}`" in page for member in said), "docs/tool.md lists every member"


@needs_tool
@pytest.mark.parametrize("change, at", [(0.5, 1), (float("nan"), 2)])
def test_an_output_that_is_wrong_is_found_where_it_is(tmp_path, change, at):
    x = Inputs(f32)
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(*attention(x))
    row = int((x.lengths > 0).nonzero()[at])
    out[row, 2, 3] += change
    file = tmp_path / "job.safetensors"
    names = dict(zip(("q", "kv", "indices", "lengths", "sink"), attention(x)[:5], strict=True))
    winnow.dump_call(file, OPERATOR, **names, v_dim=V_DIM, scale=SCALE, out=out, lse=lse)
    code, said = compare(file)
    *right, wrong = said["contenders"]
    assert code == 1 and not said["ok"] and wrong["contender"] == "file"
    assert all(each.get("ok", True) for each in right)
    found, other = wrong["outputs"]
    assert found["what"] == "out" and found["result"] == "failed" and other["result"] == "ok"
    place = {"row": row, "head": 2, "channel": 3}
    assert found["most"]["at"] == found["first"]["at"] == place
    text = subprocess.run([TOOL, "compare", file], capture_output=True, text=True).stdout
    assert f"most at row {row}, head 2, channel 3: " in text and "FAILED" in text


@needs_tool
@pytest.mark.parametrize("spoil", ["key", "order", "length"])
def test_a_selection_that_is_wrong_is_found(tmp_path, spoil):
    x = Inputs(f32)
    windows = {"begin": torch.zeros(TOKENS).int(), "end": torch.full((TOKENS,), TOKENS).int()}
    indexer = {"q": x.index_q, "k": x.index_k, "weights": x.weights, "k_scale": None, **windows}
    indices, lengths, _ = torch.ops.winnow.index_topk_forward(*indexer.values(), TOPK)
    row = 5
    if spoil == "key":  # the worst of all in place of the best
        scores = torch.ops.winnow.index_topk_forward(*indexer.values(), TOKENS)[2][row]
        taken = [int(scores.argmin()), *indices[row].tolist()]
        taken.remove(int(scores.argmax()))
        indices[row] = torch.tensor(sorted(taken))
    elif spoil == "order":
        indices[row] = indices[row].flip(0)
    else:
        lengths[row] -= 1
    file = tmp_path / "job.safetensors"
    winnow.dump_call(
        file, "index_topk_forward", **indexer, topk=TOPK, indices=indices, lengths=lengths
    )
    code, said = compare(file)
    failed = [each for each in said["contenders"][-1]["outputs"] if each["result"] == "failed"]
    assert code == 1 and len(failed) == 1
    if spoil == "key":
        assert failed[0]["first"]["at"]["row"] == row
    else:
        assert failed[0]["note"].startswith(f"row {row}: ")


@needs_tool
def test_rows_can_be_few(tmp_path):
    rows = 40
    q, kv = torch.randn(rows, 2, 16), torch.randn(rows, 16)
    indices = torch.randint(0, rows, (rows, 8)).int()
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(q, kv, indices, None, None, 16, 0.25)
    file = tmp_path / "job.safetensors"
    with winnow.dump(file, "sparse_attention_backward"):
        torch.ops.winnow.sparse_attention_backward(
            q, kv, indices, None, None, out, lse, torch.randn(rows, 2, 16), None, 0.25
        )
    code, said = compare(file, "--rows", "5")
    assert code == 0 and said["compared_rows"] == 5 and said["query_rows"] == rows
    compared = [c for c in said["contenders"] if "why_not" not in c]
    whats = [[each["what"] for each in c["outputs"]] for c in compared]
    # A sum over all rows, as the file has it, cannot be held against one over five.
    assert whats == [["d_q", "d_kv"], ["d_q", "d_kv"], ["d_q"]]
    code, said = compare(file, "--backend", "cpu", "--kernel", "simd")
    assert code == 0 and [c["contender"] for c in said["contenders"]] == ["cpu", "file"]


@needs_tool
def test_a_comparison_in_which_no_kernel_ran_is_not_ok(tmp_path):
    x = Inputs(torch.float64)  # which the reference alone takes
    file = tmp_path / "job.safetensors"
    with winnow.dump(file, OPERATOR):
        torch.ops.winnow.sparse_attention_forward(*attention(x))
    assert compare(file)[0] == 0
    words = [TOOL, "compare", file, "--json", "--backend", "cpu"]
    ran = subprocess.run(words, capture_output=True, text=True)
    said = json.loads(ran.stdout)
    assert ran.returncode == 1 and not said["ok"]
    # The kernels of cpu, and the file.
    assert ["why_not" in each for each in said["contenders"]] == [True, True, False]
    assert f"{file}: no kernel ran" in ran.stderr


@needs_tool
def test_the_kernel_of_another_operator_is_refused(tmp_path):
    said = json.loads(subprocess.check_output([TOOL, "info", "--json"]))
    names = {
        each["name"]: {name for kernels in each["kernels"].values() for name in kernels}
        for each in said["operators"]
    }
    file = tmp_path / "job.safetensors"
    winnow.dump_call(file, "quantize_fp8", x=torch.ones(2, 8))
    others = set().union(*names.values()) - names["quantize_fp8"]
    for name in {"none", *others}:  # a build without CUDA has the same names for all
        words = [TOOL, "compare", file, "--kernel", name]
        ran = subprocess.run(words, capture_output=True, text=True)
        assert ran.returncode == 2 and f"no kernel '{name}' on" in ran.stderr


@needs_tool
def test_files_of_others_are_read_or_refused(tmp_path):
    x = Inputs(f32)
    file = tmp_path / "other.safetensors"
    tensors = {"indices": x.indices, "scores": x.scores, "target": x.target}
    words = {"winnow_operator": "index_loss", "loss": f"F32[{TOKENS}]", "format": "pt"}
    words["d_scores"] = f"F32[{TOKENS}, {TOPK}]"
    save_file(tensors, file, words)
    assert compare(file)[0] == 0
    save_file(tensors, file)
    assert "its metadata has no winnow_operator" in refusal(file)
    save_file(tensors | {"target": x.target[1:]}, file, words)
    assert f"{file}: index_loss: target f32[11, 4]: tokens must be 12" in refusal(file)
    save_file(tensors | {"scores": x.scores.double()}, file, words)
    assert "index_loss: " in refusal(file)
    file.write_bytes(file.read_bytes()[:-1])
    said = refusal(file)
    assert said.startswith(f"winnow: {file}: ") and " has data_offsets [" in said
    assert "No such file" in refusal(tmp_path / "none")


@needs_tool
@pytest.mark.parametrize("factor", [1, 1e-4])
def test_gradients_whose_terms_cancel_are_judged_by_their_terms(tmp_path, factor):
    """With values that hardly differ, the gradient of q is a difference of large numbers."""
    random, rows, scale = torch.Generator().manual_seed(1), 8, 0.25
    q, kv = torch.randn(rows, 2, 16, generator=random), torch.randn(rows, 16, generator=random)
    kv[:, :8] = 1 + factor * kv[:, :8]
    indices = torch.arange(rows).int().expand(rows, rows).contiguous()
    out, lse, _ = torch.ops.winnow.sparse_attention_forward(q, kv, indices, None, None, 8, scale)
    forward = (q, kv, indices, None, None, out, lse, torch.ones_like(out))
    file = tmp_path / "job.safetensors"
    with winnow.dump(file, "sparse_attention_backward"):
        d_q, _, _ = torch.ops.winnow.sparse_attention_backward(*forward, None, scale)
    double = (x.double() if x is not None and x.is_floating_point() else x for x in forward)
    exact, _, _ = torch.ops.winnow.sparse_attention_backward(*double, None, scale)
    by_own_norm = ((d_q - exact).norm() / exact.norm()).item()
    assert (by_own_norm > 1e-5) == (factor < 1), by_own_norm
    assert compare(file)[0] == 0
    tensors, words = load_file(file), metadata(file)
    tensors["d_q"] = d_q + 0.01  # of terms that are about 1
    save_file(tensors, file, words)
    assert compare(file)[0] == 1
