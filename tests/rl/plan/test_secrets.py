"""Secrets in a config: what is taken for one at any depth, and what a reference becomes."""

from typing import Any

import pytest

from enginehouse.errors import UserError
from enginehouse.plugin.findings import Findings
from enginehouse.plugin.secrets import check_secrets, escape_references, insert_variables


def said_of(arguments: dict[str, Any], **details: bool) -> list[str]:
    findings = Findings()
    check_secrets(findings, "x", arguments, **details)
    return [str(one) for one in findings.problems]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"token": "s3"}, "x.token"),
        ({"secret_key": "s3"}, "x.secret_key"),
        ({"wandb_key": "s3"}, "x.wandb_key"),
        ({"apiKey": "s3"}, "x.apiKey"),
        ({"api-key": "s3"}, "x.api-key"),
        ({"passwd": "s3"}, "x.passwd"),
        ({"client_secret": "s3"}, "x.client_secret"),
        ({"access_token": "s3"}, "x.access_token"),
        ({"api_key": ["s3"]}, "x.api_key[0]"),
        ({"api_keys": {"here": "s3"}}, "x.api_keys.here"),
        ({"client": {"api_key": "s3"}}, "x.client.api_key"),
        ({"clients": [{"password": "s3"}]}, "x.clients[0].password"),
        ({"headers": {"Authorization": "s3"}}, "x.headers.Authorization"),
        ({"said": "Bearer s3s3s3s3s3"}, "x.said"),
        ({"url": "https://user:s3@host/v1"}, "x.url"),
        ({"url": "https://host/v1?model=a&api_key=s3"}, "x.url"),
        ({"url": "https://host/v1?key=s3"}, "x.url"),
        ({"url": "https://host/v1?a=https%3A%2F%2Fother%2F%3Ftoken%3Ds3"}, "x.url"),
        ({"url": "https://host/rows.jsonl?X-Amz-Signature=s3456789abcdefabcdef"}, "x.url"),
        ({"url": "https://host/rows.jsonl?sv=2024-11-04&sig=s3+56789%2Fabcdefghijk%3D"}, "x.url"),
        ({"slack_token": "s3-0123456789-abcdefghij"}, "x.slack_token"),
        ({"judge": "sk-s301234567890123456789"}, "x.judge"),
    ],
)
def test_a_secret_is_refused_at_any_depth_and_not_printed(arguments: dict[str, Any], key: str):
    (said,) = said_of(arguments)
    assert said.startswith(f"{key} holds a secret")
    assert "s3" not in said


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 3, "stop_tokens": ["</s>"], "eos_token": "<|end_of_text|>", "pad_token": "[PAD]"},
        {"key": "answer", "answer_key": "solution", "keys": ["a"], "tokenizer": "models/tiny", "monkey": "see"},
        {
            "url": "https://host:8000/v1?max_tokens=3&eos_token=x&api_key=",
            "ask": "which? token=5",
            "row": "https://host/v1?sig=2&signature=none",
            "at": "postgres://user@host/db",
            "mail": "a:b@c",
        },
        {"hf_token": True, "api_key": None, "password": ""},
        {"text": "the bearer of tokens", "password_file": "/run/password", "author": "me", "keyword": "no"},
    ],
)
def test_what_is_no_secret_is_not_taken_for_one(arguments: dict[str, Any]):
    assert said_of(arguments) == []


def test_a_reference_is_read_at_every_depth_and_inside_a_text(monkeypatch):
    monkeypatch.setenv("K", "hush")
    given = {
        "api_key": "${K}",
        "headers": {"Authorization": "Bearer ${K}"},
        "api_keys": ["${K}", "a-${K}-${K}"],
        "url": "https://me:${K}@host/",
        "number": 3,
    }
    assert said_of(given) == []
    assert insert_variables(given) == {
        "api_key": "hush",
        "headers": {"Authorization": "Bearer hush"},
        "api_keys": ["hush", "a-hush-hush"],
        "url": "https://me:hush@host/",
        "number": 3,
    }
    assert given["headers"] == {"Authorization": "Bearer ${K}"}


def test_two_dollars_are_no_reference_and_what_was_read_is_not_read_again(monkeypatch):
    assert said_of({"prompt": "what is $${x}$?"}) == []
    assert insert_variables({"prompt": "what is $${x}$?"}) == {"prompt": "what is ${x}$?"}
    monkeypatch.setenv("K", "a${K}$${K}")
    read = insert_variables({"n": ["${K}"]})
    assert read == {"n": ["a${K}$${K}"]}
    assert insert_variables(escape_references(read)) == read


def test_a_variable_that_is_not_there_is_refused_where_it_stands(monkeypatch):
    monkeypatch.delenv("NO_SUCH_ONE", raising=False)
    (said,) = said_of({"n": [{"h": "Bearer ${NO_SUCH_ONE}"}]})
    assert said.startswith("x.n[0].h: there is no environment variable NO_SUCH_ONE")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("rollout.engine.options.native={client: {api_key: s3}}", "rollout.engine.options.native.client.api_key"),
        ("actor.engine.options={password: s3}", "actor.engine.options.password"),
        ("algorithm.loss.arguments={api_key: '${K}'}", "algorithm.loss.arguments.api_key"),
    ],
)
def test_options_of_engines_and_arguments_of_losses_hold_none_and_read_none(make, monkeypatch, override, key):
    monkeypatch.setenv("K", "hush")
    with pytest.raises(UserError) as caught:
        make(override)
    assert f"{key} holds a secret" in str(caught.value)
    assert "environment variables are not inserted here" in str(caught.value)
    assert "s3" not in str(caught.value)
