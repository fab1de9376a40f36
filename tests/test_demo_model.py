"""The demo's model, template and questions: they are small, they load, and they keep what the demo needs of them."""

import ast
import dataclasses
import importlib.util
import json
import operator
import re
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).resolve().parents[1] / "demo"
LARGEST = 4 * 2**20  # bytes of the model's directory
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "The expression, for example (3+4)*5."}},
            "required": ["expression"],
        },
    },
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def call(*expressions, content=None, as_text=False):
    arguments = [{"expression": expression} for expression in expressions]
    functions = [{"name": "calculator", "arguments": json.dumps(one) if as_text else one} for one in arguments]
    calls = [{"type": "function", "id": f"call_{i}", "function": one} for i, one in enumerate(functions)]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def said(role, content):
    return {"role": role, "content": content}


TOM = said("user", "Tom has 12 apples and buys 3 bags of 4 apples. How many apples does Tom have now?")
WRONG = said("user", "That is not right. Read the question again and have another try.")
RIGHT_CALL = [call("12+3*4"), said("tool", "24"), said("assistant", "#### 24")]
WRONG_CALL = [call("12+3"), said("tool", "15"), said("assistant", "#### 15")]
CONVERSATIONS = {
    "answer": [TOM, said("assistant", "#### 24")],
    "tool": [TOM, *RIGHT_CALL],
    "error": [TOM, call("12+*4"), said("tool", "Error: '12+*4' is not an arithmetic expression"), *RIGHT_CALL],
    "retry": [TOM, *WRONG_CALL, WRONG, *RIGHT_CALL],
    "parallel": [TOM, call("3*4", "12+12"), said("tool", "12"), said("tool", "24"), said("assistant", "#### 24")],
    "content and calls": [TOM, call("3*4", content="First the bags."), said("tool", "12"), *RIGHT_CALL],
    "arguments as text": [TOM, call("3*4", as_text=True), said("tool", "12"), *RIGHT_CALL],
    "system": [said("system", "Be exact."), TOM, *WRONG_CALL, said("system", "Careful."), WRONG, *RIGHT_CALL],
}
ODD_TEXTS = [
    "",
    " \t ",
    "\n\n\r\n x",
    "Zoë's naïve café",
    "价格是 24 元",
    "👩‍🚀🏽 ½ ٣ Ⅷ",
    "e\u0301 is not \u00e9",
    "a\u00a0b\u200dc\u2028d",
    "\x00\x7f\uffff",
    '{"x": [1, 2.5e-6], "y": "\\n"}  1,234',
]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(DEMO / "model")


@pytest.fixture(scope="module")
def maker():
    spec = importlib.util.spec_from_file_location("demo_questions", DEMO / "questions.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)  # a dataclass looks up its module while it is made
        spec.loader.exec_module(module)
        yield module


def read(name):
    return [json.loads(line) for line in (DEMO / name).read_text().splitlines()]


def value(node):
    """An expression's value, exactly as its tree says: nothing of what is tested takes part in it."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    assert isinstance(node, ast.Constant)
    assert isinstance(node.value, int)
    return node.value


def test_the_model_is_small():
    assert sum(path.stat().st_size for path in (DEMO / "model").rglob("*")) <= LARGEST


def test_the_model_loads_and_agrees_with_its_tokenizer(tokenizer):
    model = AutoModelForCausalLM.from_pretrained(DEMO / "model")
    end, pad = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.config.vocab_size == len(tokenizer) <= 800
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == pad


def test_the_model_has_the_template_of_the_repository(tokenizer):
    assert tokenizer.chat_template == (DEMO / "chat_template.jinja").read_text()


def test_the_prompt_is_short(tokenizer):
    ids = tokenizer.apply_chat_template([TOM], tools=[CALCULATOR], add_generation_prompt=True)["input_ids"]
    assert len(ids) < 110


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [CALCULATOR]], ids=["no tools", "tools"])
def test_a_longer_conversation_extends_a_shorter_one(tokenizer, name, tools):
    messages = CONVERSATIONS[name]
    whole = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    for n, following in enumerate(messages):
        if n == 0 or messages[n - 1]["role"] == following["role"] == "tool":
            continue  # the results of one turn are one message: they come together
        cue = following["role"] == "assistant"
        shorter = tokenizer.apply_chat_template(messages[:n], tools=tools, add_generation_prompt=cue, tokenize=False)
        assert whole.startswith(shorter)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_turn_has_the_same_tokens_alone_and_in_the_conversation(tokenizer, name):
    messages = CONVERSATIONS[name]
    whole = tokenizer.apply_chat_template(messages, tools=[CALCULATOR])["input_ids"]
    for n, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(messages[:n], tools=[CALCULATOR], add_generation_prompt=True)
            assert whole[: len(prompt["input_ids"])] == prompt["input_ids"]


def test_a_call_is_rendered_as_the_model_writes_it(tokenizer):
    rendered = tokenizer.apply_chat_template([TOM, call("12+3*4")], tokenize=False)
    written = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+3*4"}}\n</tool_call>'
    assert rendered.endswith(f"<|im_start|>assistant\n{written}<|im_end|>\n")
    assert tokenizer.apply_chat_template([TOM, call("12+3*4", as_text=True)], tokenize=False) == rendered
    assert tokenizer.apply_chat_template([TOM, said("assistant", written)], tokenize=False) == rendered


def test_results_of_one_turn_are_one_message(tokenizer):
    rendered = tokenizer.apply_chat_template(CONVERSATIONS["parallel"], tokenize=False)
    results = "<tool_response>\n12\n</tool_response>\n<tool_response>\n24\n</tool_response>"
    assert f"<|im_end|>\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n" in rendered


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_every_digit_is_a_token(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12+345")] == ["1", "2", "+", "3", "4", "5"]


def test_answers_agree_with_expressions(maker):
    rows = maker.questions(seed=7, count=2000)
    kinds = {re.sub(r"\d+", "n", row["expression"]) for row in rows}
    assert len(kinds) == len(maker.KINDS)
    for row in rows:
        assert value(ast.parse(row["expression"], mode="eval").body) == int(row["answer"])
        assert int(row["answer"]) >= 0


def test_the_expression_has_the_numbers_of_the_question(maker):
    for row in maker.questions(seed=8, count=500):
        numbers = re.findall(r"\d+", row["prompt"][0]["content"])
        assert re.findall(r"\d+", row["expression"]) == numbers


def test_the_same_seed_draws_the_same_questions(maker):
    assert maker.questions(seed=3, count=20) == maker.questions(seed=3, count=20)
    assert maker.questions(seed=3, count=20) != maker.questions(seed=4, count=20)


def test_the_data_does_not_overlap():
    train, heldout = read("train.jsonl"), read("heldout.jsonl")
    assert (len(train), len(heldout)) == (2048, 256)
    assert len({row["prompt"][0]["content"] for row in train + heldout}) == 2048 + 256
    assert set(train[0]) == {"prompt", "answer", "expression"}


@pytest.mark.slow
def test_the_model_can_be_made_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DEMO))
    spec = importlib.util.spec_from_file_location("demo_make_model", DEMO / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        module, "LESSONS", [dataclasses.replace(lesson, steps=2, warmup=1) for lesson in module.LESSONS]
    )
    monkeypatch.setattr(module, "TRAIN", 16)
    monkeypatch.setattr(module, "HELDOUT", 4)
    monkeypatch.setattr(sys, "argv", ["make_model.py", "--out", str(tmp_path), "--threads", "1"])
    module.main()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == model.config.vocab_size  # from 16 conversations, the vocabulary is smaller than VOCABULARY
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("train.jsonl", "heldout.jsonl")] == [16, 4]
