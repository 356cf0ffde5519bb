"""Right answers to BFCL's questions of a single turn, from their ground truth, and wrong ones.

The ground truth lists what each parameter may be, where "" means that it may be left out.
"""

import itertools
import json

ALTERNATIVES = 50  # combinations that are tried


def answer(calls):
    """The answer in ToolRL's form that makes [(name, parameters)]."""
    lines = [json.dumps({"name": name, "parameters": given}) for name, given in calls]
    return "\n".join(["<think> x </think>", "<tool_call>", *lines, "</tool_call>"])


def functions(category, environment):
    """{id: the functions of a question, with their types in Java or JavaScript}."""
    (file,) = environment.glob(f"lib/*/site-packages/bfcl_eval/data/BFCL_v3_{category}.json")
    rows = map(json.loads, file.read_text().splitlines())
    return {row["id"]: row["function"] for row in rows}


def right_calls(row, category):
    """Yield calls that the ground truth allows, with other alternatives each time."""
    types = {one["name"]: one["parameters"]["properties"] for one in row["function"]}
    names, each = [], []
    for one in row["ground_truth"]:
        ((name, gold),) = one.items()
        # where there is one function, the ground truth may give it another name
        names.append(name if name in types else row["function"][0]["name"])
        found = _parameters(gold, types[names[-1]], category)
        each.append([*itertools.islice(found, ALTERNATIVES)])
    for number in range(max(map(len, each))):
        given = [options[min(number, len(options) - 1)] for options in each]
        yield [*zip(names, given, strict=True)]


def _parameters(gold, types, category):
    options = []
    for key, allowed in gold.items():
        # some ground truths allow to leave out what the document does not have
        type_ = types.get(key, {"type": ""})
        values = [_literal(_value(one), type_, category) for one in allowed if one != ""]
        options.append([*values, None] if "" in allowed else values)
    for given in itertools.product(*options):
        yield {key: one for key, one in zip(gold, given, strict=True) if one is not None}


def _value(gold):
    """The value of an alternative: within objects, each key has alternatives of its own."""
    if isinstance(gold, list):
        return [_value(one) for one in gold]
    if not isinstance(gold, dict):
        return gold
    first = {key: [one for one in allowed if one != ""] for key, allowed in gold.items()}
    return {key: values[0] for key, values in first.items() if values}


def _literal(value, type_, category):
    """A value as a text of Java or JavaScript; itself in Python."""
    if category not in ("java", "javascript"):
        return value
    kind = type_["type"]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        inner = type_.get("items", {"type": ""})
        # the package takes texts in a Java array without quotes alone, which is no Java
        as_text = category == "javascript" or (kind == "ArrayList" and inner["type"] == "String")
        texts = ", ".join(
            _quoted(one, category) if as_text else _literal(one, inner, category) for one in value
        )
        form = {"ArrayList": "new ArrayList<>(Arrays.asList(%s))", "Array": "new Object[]{%s}"}
        return form.get(kind, "[%s]") % texts
    if isinstance(value, dict):
        pairs = {key: _quoted(one, category) for key, one in value.items()}
        if category == "java":
            puts = " ".join(f'put("{key}", {text});' for key, text in pairs.items())
            return f"new HashMap<>() {{{{ {puts} }}}}"
        return "{" + ", ".join(f"{key}: {text}" for key, text in pairs.items()) + "}"
    if isinstance(value, str) and kind == "String" and "items" not in type_:
        return value
    return f"{value}" + {"long": "L", "float": "f" * (category == "java"), "Bigint": "n"}.get(
        kind, ""
    )


def _quoted(value, category):
    if isinstance(value, str):
        return json.dumps(value)
    return _literal(value, {"type": ""}, category)


def wrong_answers(calls):
    """{what is wrong: (answer, the calls that are in it)}, from right calls."""
    (name, given), *rest = calls
    key = next(iter(given), "none")
    first = {
        "name": (f"{name}x", given),
        "missing": (name, dict([*given.items()][1:])),
        "extra": (name, {**given, "not_there": 1}),
        "type": (name, {**given, key: _of_another_type(given.get(key))}),
        "nested": (name, {**given, key: {"within": [given.get(key)]}}),
        "optional": (name, dict([*given.items()][:-1])),
    }
    told = {kind: [call, *rest] for kind, call in first.items()}
    told["order"] = [(name, dict(reversed(given.items()))) for name, given in reversed(calls)]
    told["two for one"] = [*calls, calls[-1]]
    made = {kind: (answer(wrong), wrong) for kind, wrong in told.items()}
    right, other = answer(calls), answer([("other", {})])
    made["prose around"] = (f"I would say:\n{right}\nThat is all.", calls)
    made["broken JSON"] = (right.replace("}\n</tool_call>", "\n</tool_call>"), calls[:-1])
    made["two tags"] = (f"{right}\n{other}", [("other", {})])
    return made


def _of_another_type(value):
    if isinstance(value, str):
        return 7
    return [value] if isinstance(value, (dict, bool)) or value is None else str(value)
