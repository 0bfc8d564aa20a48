"""Are the versions that a run is recorded with those of the packages that are installed?"""

from __future__ import annotations

import platform
from importlib import metadata

import pytest

from snip_hf.records import versions
from snip_hf.records.versions import installed_versions


def test_versions_are_those_of_python_and_of_the_installed_packages() -> None:
    found = installed_versions()
    assert found["python"] == platform.python_version()
    assert found["torch"] == metadata.version("torch")
    assert found["transformers"] == metadata.version("transformers")


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "_PACKAGES", ("torch", "no-such-package-as-this"))
    assert set(installed_versions()) == {"python", "torch"}
