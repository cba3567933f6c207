"""Which class of a configuration is imported: code of its own only where it may run."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from toolkit.errors import SpecError
from toolkit.modeling.architecture import import_architecture


@pytest.mark.parametrize("own", ["modeling_mine.Mine", ["modeling_mine.Mine"], {"AutoModelForCausalLM": 5}])
def test_code_that_is_named_wrongly_matters_only_where_it_may_run(own: object) -> None:
    config = LlamaConfig(auto_map=own)
    import_architecture(config)
    with pytest.raises(SpecError, match=r"auto_map=.* names no class") as caught:
        import_architecture(config, trust_remote_code=True)
    assert caught.value.codes == ("MODEL_CONFIG_INVALID",)
