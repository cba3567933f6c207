"""What keeps a model from being sharded is named, all at once, and the model stays as it was."""

from __future__ import annotations

import doctest
from typing import Any

import pytest
import torch
from sharded_models import dense_model
from torch import nn

from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.errors import PlanError
from toolkit.planning.rules.tensor import WHOLE_MODEL_TYPES
from toolkit.tensor_parallel import decoder as decoder_module
from toolkit.tensor_parallel import plan as styles_module
from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.grad_sync import summed_parameters
from toolkit.tensor_parallel.layout import Part
from toolkit.tensor_parallel.plan import (
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    Replicated,
    RowParallel,
    Style,
    TPPlan,
    Vocabulary,
)
from toolkit.tensor_parallel.tables import FUSED_QKV, WIDTH, tp_plan_for
from toolkit.topology.grid import Grid

COLUMN, ROW = ColumnParallel(parts=("width",)), RowParallel(part="width")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.inner = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4), Inner()


class Model(nn.Module):
    """A model that is not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 10, bias=False)


NORM = {"blocks.*.norm": Replicated(reads_shards=False)}
WHOLE_INNER = {"blocks.*.inner": Replicated(reads_shards=False)}
SOUND: dict[str, Style] = {"blocks.*.up": COLUMN, "blocks.*.down": ROW, **NORM, **WHOLE_INNER}


def problems_of(
    model: nn.Module, styles: TPPlan, tp: int, *, sequence_parallel: bool = False
) -> list[tuple[str, str, str]]:
    before = dict(model.named_parameters())
    with fake_world(Grid(tp=tp)):
        group = join_group(Grid(tp=tp), 0, "tp")
        try:
            apply_tensor_parallel(model, styles, tp_group=group, sequence_parallel=sequence_parallel)
        except PlanError as error:
            after = dict(model.named_parameters())
            assert all(after[name] is parameter for name, parameter in before.items()), "the model was touched"
            return [(problem.code, problem.key, str(problem)) for problem in error.problems]
    return []


def of_table(
    table: dict[str, Style], *, tp: int = 2, heads: Heads | None = None, model: nn.Module | None = None
) -> Any:
    return problems_of(model or Model(), TPPlan(heads=heads or Heads(query=2, key_value=2), table=table), tp)


def test_a_sound_table_of_one_s_own_is_accepted() -> None:
    assert of_table(SOUND) == []
    inside = {"blocks.*.inner.up": COLUMN, "blocks.*.inner.down": ROW}
    assert of_table(inside) == []
    assert of_table({**SOUND, **inside} | {"embed": Vocabulary(), "head": Vocabulary()}) == []


def test_a_name_that_matches_nothing_is_named_with_what_is_near() -> None:
    [(code, key, text)] = of_table({**SOUND, "block.*.upp": COLUMN})
    assert (code, key) == ("TP_STYLE_UNUSED", "block.*.upp")
    assert "matches no module of Model" in text
    assert "blocks.*.up" in text


def test_layers_directly_under_the_model_are_sharded_and_named_as_they_are() -> None:
    inside = {"up": COLUMN, "down": ROW}
    assert of_table(inside, model=Inner()) == []
    [(code, key, text)] = of_table({"up": COLUMN, "down": ROW, "inner": Replicated(reads_shards=False)}, model=Block())
    assert (code, key) == ("TP_PLAN_INCOMPLETE", "norm")
    assert "norm is not sharded, but up" in text
    [(code, key, text), _] = of_table({"up": COLUMN}, model=Inner())
    assert (code, key) == ("TP_PLAN_INCOMPLETE", "")
    assert "the plan gives the model itself up and no RowParallel" in text
    [(code, key, text), *_] = of_table({"": COLUMN}, model=nn.Linear(4, 8))
    assert (code, key) == ("TP_STYLE_KIND", "")
    assert "the model itself is a Linear, which ColumnParallel cannot shard" in text


@pytest.mark.parametrize("left_out", ["blocks.*.norm", "blocks.*.inner"])
def test_what_is_left_whole_beside_shards_is_named_once_for_all_layers(left_out: str) -> None:
    [(code, key, text)] = of_table({name: style for name, style in SOUND.items() if name != left_out})
    assert (code, key) == ("TP_PLAN_INCOMPLETE", left_out)
    assert f"{left_out} is not sharded, but up is" in text


@pytest.mark.parametrize(
    ("left_out", "words"),
    [("down", "blocks.*.up and no RowParallel"), ("up", "no ColumnParallel and blocks.*.down")],
)
def test_columns_without_a_row_and_a_row_without_columns(left_out: str, words: str) -> None:
    found = of_table({**SOUND, f"blocks.*.{left_out}": Replicated(reads_shards=False)})
    assert [(code, key) for code, key, _ in found] == [("TP_PLAN_INCOMPLETE", "blocks.*")]
    assert words in found[0][2]


def test_only_some_layers_in_the_table() -> None:
    table = {name.replace("*", "1"): style for name, style in SOUND.items()}
    assert of_table(table) == []
    found = of_table({**SOUND, "blocks.0.up": Replicated(reads_shards=False)})
    assert [code for code, _, _ in found] == ["TP_PLAN_INCOMPLETE"]


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("blocks.*.norm", COLUMN),
        ("blocks.*.norm", Vocabulary()),
        ("embed", ROW),
        ("blocks.*.up", Experts()),
        ("blocks.*.norm", FeatureNorm(part="width")),
        ("blocks", ROW),
    ],
)
def test_a_style_that_the_module_is_not_made_for(name: str, style: Style) -> None:
    assert ("TP_STYLE_KIND", name) in {(code, key) for code, key, _ in of_table({**SOUND, name: style})}


def test_an_empty_table_is_refused() -> None:
    ((code, key, message),) = of_table({})
    assert (code, key) == ("TP_STYLE_UNUSED", "table")
    assert "would be replicated" in message


@pytest.mark.parametrize("value", ["colwise", None, 2])
def test_what_is_no_style_is_refused(value: object) -> None:
    ((code, key, message),) = of_table({**SOUND, "embed": value})
    assert (code, key) == ("TP_STYLE_KIND", "embed")
    assert repr(value) in message


def test_quantised_weights_and_unknown_embeddings_are_not_sharded() -> None:
    model = Model()
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(8, 4, dtype=torch.uint8), requires_grad=False)
    assert [code for code, _, _ in of_table({**SOUND, "blocks.1.up": COLUMN}, model=model)] == ["TP_STYLE_KIND"]

    class Odd(nn.Embedding):
        pass

    model = Model()
    model.embed = Odd(10, 4)
    assert [code for code, _, _ in of_table({"embed": Vocabulary()}, model=model)] == ["TP_STYLE_KIND"]


def test_parts_that_are_not_the_layer_s() -> None:
    [(code, key, text)] = of_table({**SOUND, "blocks.*.up": ColumnParallel(parts=("query", "key_value", "key_value")), "blocks.*.down": RowParallel(part="query")})  # fmt: skip
    assert (code, key) == ("TP_PLAN_SHAPE", "blocks.*.up")
    assert "6 does not divide 8 features" in text


def test_widths_that_ranks_cannot_share() -> None:
    found = of_table(SOUND, tp=3)
    assert [(code, key) for code, key, _ in found] == [("TP_DIVISIBILITY", "parallel.tensor")] * 2
    assert "tensor=3 cannot shard the 8 features of blocks.*.up" in found[0][2]
    assert "Set tensor to one of 1, 2, 4, 8" in found[0][2]
    assert [code for code, _, _ in of_table(SOUND, tp=16)] == ["TP_DIVISIBILITY"] * 2


@pytest.mark.parametrize(
    ("query", "key_value", "tp", "valid"),
    [(4, 2, 3, "1, 2, 4"), (12, 3, 2, "1, 3, 6, 12"), (12, 4, 6, "1, 2, 4, 12"), (4, 4, 8, "1, 2, 4")],
)
def test_heads_that_ranks_cannot_share(query: int, key_value: int, tp: int, valid: str) -> None:
    model = dense_model("llama", key_value, num_attention_heads=query, intermediate_size=48)
    [(code, _, text)] = problems_of(model, tp_plan_for(model), tp)
    assert code == "TP_HEADS"
    assert text.startswith(f"tensor={tp} ")
    assert f"Set tensor to one of {valid}." in text


def test_experts_must_leave_rows_that_the_kernels_take() -> None:
    model = dense_model("mixtral", intermediate_size=24)
    [(code, _, text)] = problems_of(model, tp_plan_for(model), 4)
    assert code == "TP_DIVISIBILITY"
    assert "a multiple of 4, as the kernels require" in text
    assert "Set tensor to one of 1, 2, 3, 6." in text


def test_a_shared_weight_needs_one_style() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    found = of_table({"head": Vocabulary()}, model=model)
    assert [code for code, _, _ in found] == ["TP_STYLE_TIED"]
    assert "embed, head share one weight" in found[0][2]
    assert of_table({"head": Vocabulary(), "embed": Vocabulary()}, model=model) == []


def test_all_problems_come_at_once() -> None:
    table = {"nowhere": COLUMN, "blocks.*.up": COLUMN, "blocks.*.down": ROW, "embed": ROW}
    assert {code for code, _, _ in of_table(table, tp=3)} == {
        "TP_STYLE_UNUSED", "TP_DIVISIBILITY", "TP_STYLE_KIND", "TP_PLAN_INCOMPLETE",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("mamba", {}, "backbone.layers.*.mixer.in_proj"),
        ("rwkv", {"attention_hidden_size": 16}, "rwkv.blocks.*.attention.key"),
        pytest.param("falcon_mamba", {}, "backbone.layers.*.mixer.in_proj", marks=pytest.mark.full),
        pytest.param(
            "mamba2",
            {"head_dim": 8, "num_heads": 4, "n_groups": 1},
            "backbone.layers.*.mixer.in_proj",
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_unknown_architecture_is_refused_with_what_to_write(
    model_type: str, values: dict[str, Any], words: str
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, vocab_size=64, **sizes | values))
    with pytest.raises(PlanError) as caught:
        tp_plan_for(model)
    assert caught.value.codes == ("TP_ARCHITECTURE",)
    assert model_type in WHOLE_MODEL_TYPES, "and so is its plan"
    text = str(caught.value)
    assert f"model_type={model_type}) could not be proven on a small twin: only 0% of its parameters" in text
    assert f'"{words}": …,  #' in text
    assert "Vocabulary()" in text


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma3_text", "starcoder2"])
def test_what_is_derived_for_an_architecture_is_the_table_that_is_written_for_it(name: str) -> None:
    model = dense_model(name)
    written = tp_plan_for(model)
    model.config.model_type = "unheard-of"
    assert tp_plan_for(model) == written


def in_pieces(model: nn.Module, table: dict[str, Style]) -> list[tuple[str, str, str]]:
    styles = TPPlan(heads=Heads(query=2, key_value=2), table=table)
    return problems_of(model, styles, 2, sequence_parallel=True)


def test_a_table_of_one_s_own_may_lie_in_pieces() -> None:
    assert in_pieces(Model(), SOUND) == []
    assert in_pieces(Model(), {**SOUND, "blocks.*.inner.up": COLUMN, "blocks.*.inner.down": ROW}) == []


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"embed": Vocabulary()}, "its sharded modules lie in 0 lists of decoder layers instead of all in one"),
        (
            {"blocks.*.inner.up": COLUMN, "blocks.*.inner.down": ROW},
            "blocks.0.up may mix tokens and is not in the plan, blocks.0.down may mix tokens and is not in the plan",
        ),
        (
            {**SOUND, "blocks.*.up": ColumnParallel(parts=("query",)), "blocks.*.down": RowParallel(part="query")},
            "blocks.0 computes attention itself",
        ),
        (
            {name.replace("*", "1"): style for name, style in SOUND.items()},
            "blocks.0.up may mix tokens and is not in the plan, blocks.0.down may mix",
        ),
    ],
)
def test_a_table_whose_sequence_cannot_lie_in_pieces(table: dict[str, Style], words: str) -> None:
    [(code, key, text)] = in_pieces(Model(), table)
    assert (code, key) == ("TP_SEQUENCE_ARCHITECTURE", "parallel.sequence_parallel")
    assert "sequence parallelism of Model is not possible" in text
    assert words in text


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("opt", {"layerdrop": 0.1}, "layerdrop drops layers"),
        ("mixtral", {"router_jitter_noise": 0.1, "attention_dropout": 0.1}, "model.layers.0.mlp adds noise"),
    ],
)
def test_a_model_whose_sequence_cannot_lie_in_pieces(name: str, values: dict[str, Any], words: str) -> None:
    model = dense_model(name, **values)
    [(code, _, text)] = problems_of(model, tp_plan_for(model), 2, sequence_parallel=True)
    assert code == "TP_SEQUENCE_ARCHITECTURE"
    assert words in text
    assert problems_of(model, tp_plan_for(model), 2) == []


def test_parameters_whose_gradients_are_parts_are_told() -> None:
    of_norms = {f"model.layers.{layer}.self_attn.{name}_norm.weight" for layer in (0, 1) for name in "qk"}
    on_pieces = {
        f"model.layers.{layer}.{name}_layernorm.weight" for layer in (0, 1) for name in ("input", "post_attention")
    }
    for pieces, names in ((False, of_norms), (True, of_norms | on_pieces | {"model.norm.weight"})):
        model = dense_model("qwen3_moe")  # its routers read the whole sequence
        assert problems_of(model, tp_plan_for(model), 2, sequence_parallel=pieces) == []
        assert summed_parameters(model).keys() == names


def test_a_sharded_model_on_meta_has_the_shapes_of_one_rank() -> None:
    with torch.device("meta"):
        model = dense_model("phi3", 2)
    with fake_world(Grid(dp=2, tp=4), rank=5):
        apply_tensor_parallel(model, tp_plan_for(model), tp_group=join_group(Grid(dp=2, tp=4), 5, "tp"))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (3 * 4, 16)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (16, 4)
    assert shapes["model.layers.0.mlp.gate_up_proj.weight"] == (16, 16)
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (16, 16)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert parameter_shards(model)["model.layers.1.self_attn.qkv_proj.weight"].layout.parts[0] == Part(
        num_units=4, unit_size=4
    )


@pytest.mark.parametrize("module", [styles_module, decoder_module])
def test_the_examples_of_the_docstrings(module: Any) -> None:
    result = doctest.testmod(module)
    assert result.attempted
    assert result.failed == 0


def test_fused_columns_are_split_by_their_parts() -> None:
    layout = FUSED_QKV.layout(32, Heads(query=4, key_value=2))
    assert [part.num_units for part in layout.parts] == [4, 2, 2]
    assert {part.unit_size for part in layout.parts} == {4}
    assert WIDTH.layout(6, Heads(query=4, key_value=2)).parts == (Part(num_units=6),)
