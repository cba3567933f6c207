"""Where the configurations lie: in the wheel, or next to a checkout."""

from pathlib import Path

import pytest

from toolkit.catalog.files import configs_root
from toolkit.errors import SpecError


def test_configs_root_prefers_the_wheel(tmp_path: Path):
    package = tmp_path / "toolkit"
    with pytest.raises(SpecError) as caught:
        configs_root(package)
    assert caught.value.codes == ("CONFIGS_MISSING",)
    (tmp_path / "configs" / "hardware").mkdir(parents=True)
    assert configs_root(package) == tmp_path / "configs"
    (package / "_configs" / "hardware").mkdir(parents=True)
    assert configs_root(package) == package / "_configs"
