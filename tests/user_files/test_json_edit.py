"""A change of a JSON text is the change of its value, and of nothing else."""

from __future__ import annotations

import json
import random

from toolkit.user_files.json_edit import with_value, without


def made(draw, depth=0):
    kind = draw.random()
    if depth < 3 and kind < 0.4:
        return {f"{draw.choice('abc')}{at}": made(draw, depth + 1) for at in range(draw.randint(0, 4))}
    if depth < 3 and kind < 0.5:
        return [made(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return draw.choice([1, 2.5, "x,}", '{"q', None, True])


def paths(value, above=()):
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*above, key)
            yield from paths(inner, (*above, key))


def test_any_change_of_any_text():
    draw, changed = random.Random(1), 0
    for _ in range(500):
        value = made(draw)
        text = json.dumps(value, indent=draw.choice([None, 2, 4]))
        for *parents, leaf in paths(value):
            wanted = [json.loads(text) for _ in range(3)]
            nodes = list(wanted)
            for part in parents:
                nodes = [node[part] for node in nodes]
            nodes[0][leaf], nodes[1]["new"] = {"z": [1]}, 7
            del nodes[2][leaf]
            path = (*parents, leaf)
            texts = [with_value(text, path, {"z": [1]}), with_value(text, (*parents, "new"), 7), without(text, path)]
            assert [json.loads(each) for each in texts] == wanted
            changed += 1
    assert changed > 300
