"""Are kernels compiled ahead for the tensors that stand for a GPU's, and only in the process that does so?"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from snip_hf.estimation.products import is_split
from snip_hf.kernels import ahead
from snip_hf.kernels.rounding import has_kernels


def test_tensors_without_memory_have_a_gpu_only_in_a_process_that_compiles_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meta, one = torch.device("meta"), torch.ones(2, 2, device="meta")
    assert ahead.capability(meta) == (0, 0) and not is_split(one, one) and not has_kernels(meta)
    monkeypatch.setattr(ahead, "_of_meta", [(9, 0)])
    assert ahead.capability(meta) == (9, 0) and is_split(one, one)
    assert ahead.capability(torch.device("cpu")) == (0, 0)


def test_kernels_are_compiled_where_triton_launches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    assert not ahead.is_compiled(torch.device("cpu"))
    monkeypatch.setattr(ahead, "capability", lambda device: (8, 0))
    for interprets in (False, True):
        with triton.knobs.runtime.scope():
            triton.knobs.runtime.interpret = interprets
            assert ahead.is_compiled(torch.device("cuda")) is not interprets
    monkeypatch.setattr(ahead, "capability", lambda device: (7, 5))
    assert not ahead.is_compiled(torch.device("cuda"))


def test_caches_of_inductor_that_cannot_be_written_leave_tritons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton = pytest.importorskip("triton")
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert ahead.cache_folders(2) == [triton.knobs.cache.dir]
    with ahead._said("A folder"):
        ahead._copy("ab" * 32, {"one.json": str(tmp_path / "missing")}, str(tmp_path / "file" / "there"))
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("Inductor's cache: FileExistsError") and second.startswith("A folder: NotADirectoryError")


def test_a_compiled_kernel_is_copied_to_another_cache(tmp_path: Path) -> None:
    triton = pytest.importorskip("triton")
    from triton.runtime.cache import get_cache_manager

    key, here, there = "ab" * 32, str(tmp_path / "here"), str(tmp_path / "there")
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = here
        cache = get_cache_manager(key)
        files = {name: cache.put(content, name) for name, content in (("one.json", "{}"), ("one.cubin", b"\x00\xff"))}
        for _ in range(2):
            ahead._copy(key, files, there)
        assert triton.knobs.cache.dir == here
        triton.knobs.cache.dir = there
        found = get_cache_manager(key).get_group("one.json")
    assert found is not None and all(path.startswith(there) for path in found.values())
    assert {name: Path(path).read_bytes() for name, path in found.items()} == {
        "one.json": b"{}",
        "one.cubin": b"\x00\xff",
    }


def test_the_program_that_launches_a_kernel_lies_in_every_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton")
    from triton.backends.nvidia import driver

    here, there, asked = tmp_path / "here", tmp_path / "there", list[tuple[object, int]]()
    program = here / "key" / "launcher.so"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\x00\xff")

    def launcher(source: object, metadata: SimpleNamespace) -> SimpleNamespace:
        asked.append((source, metadata.num_warps))
        if source == "fails":
            raise RuntimeError("no C compiler")
        return SimpleNamespace(launch=SimpleNamespace(__self__=SimpleNamespace(__file__=str(program))))

    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    ahead._Launchers([str(here), str(there)])("one", {"num_warps": 1})
    assert not asked and not there.exists()
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    (tmp_path / "file").touch()
    compile_launcher = ahead._Launchers([str(here), str(tmp_path / "file" / "in"), str(there)])
    for source in ("one", "two", "fails", "three"):
        compile_launcher(source, {"num_warps": 4})
    assert asked == [("one", 4), ("two", 4), ("fails", 4)]
    assert [file.read_bytes() for file in (there / "key").iterdir()] == [b"\x00\xff"]
    assert (there / "key" / "launcher.so").stat().st_mode == program.stat().st_mode
    *said, last = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and all("NotADirectoryError" in line for line in said)
    assert last == "launchers of kernels: RuntimeError: no C compiler"
