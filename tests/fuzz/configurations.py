"""Configurations of models, as a file and as a load request's override: valid, or refused with a reason.

Each input is a mutation of a real configuration, read by `executor.configuration` in a process of its own, so that a
hang, a large allocation or a death is seen from outside. An input passes when it is refused with one of the mesh's
errors, or accepted: then what gateways are given of it comes back from bytes unchanged, and its JSON is accepted again.

`python -m tests.fuzz.configurations FOLDER` is that process: a question a line, an answer a line.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from deploy.local.tether import tethered
from executor.configuration.canonical import to_json
from executor.configuration.load import AutoComplete, load_model_config
from shared.configuration.parse import CONFIG_BYTES_MAX, parse_text
from shared.configuration.schema import CONFIG_DESCRIPTOR
from shared.contract.errors import ConfigError, MeshError
from shared.contract.limits import ERROR_CHARACTERS_MAX
from shared.contract.messages import ModelRecord
from tests.fuzz.mutations import NUMBERS, TEXTS, mutated_bytes, mutated_json

ROOT = Path(__file__).parents[2]
FOLDERS = ("deploy/models", "tests/fixtures", "tests/conformance/models", "tests/conformance/mesh_models")
TOKEN = re.compile(r'#[^\n]*|"(?:[^"\\\n]|\\.)*"|[\w.+-]+|[^\w\s]|\s+')
NAME = re.compile(r"^name:.*", re.MULTILINE)
PLAIN = b"""max_batch_size: 8 input { name: "X" data_type: TYPE_FP32 dims: 4 }
output { name: "Y" data_type: TYPE_FP32 dims: 4 }"""
"""A configuration with nothing wrong: what is asked for health."""
GPUS = 2


class Question(msgspec.Struct, frozen=True):
    """text: of config.pbtxt, None for no file; override: of a load request."""

    text: bytes | None = None
    override: str | None = None


class Answer(msgspec.Struct, frozen=True):
    """problem: what was wrong with how the input was taken, "" for nothing; accepted: or refused."""

    accepted: bool
    problem: str = ""


def seeds() -> list[str]:
    """Texts of real configurations, in a fixed order, without the models' names: here all have the same directory."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.pbtxt"))
    return [NAME.sub("", path.read_text()) for path in paths]


def field_names() -> list[str]:
    """Names of every field that a configuration can have, in any place."""
    names: set[str] = set()
    waiting = [CONFIG_DESCRIPTOR]
    seen: set[str] = set()
    while waiting:
        message = waiting.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        for field in message.fields:
            names.add(field.name)
            if field.message_type is not None:
                waiting.append(field.message_type)
    return sorted(names)


def mutated_text(chance: random.Random, texts: list[str], names: list[str]) -> bytes:
    """A configuration's text with some of its words changed, left out, doubled, moved or taken from another one."""
    words = TOKEN.findall(chance.choice(texts))
    donor = TOKEN.findall(chance.choice(texts))
    for _ in range(chance.choice((1, 1, 2, 4, 12))):
        if sum(map(len, words)) > CONFIG_BYTES_MAX:
            break
        place = chance.randrange(len(words) + 1)
        end = place + chance.choice((1, 1, 3, 20))
        match chance.randrange(9):
            case 0:
                del words[place:end]
            case 1:
                words[place:place] = words[place:end] * chance.choice((1, 2, 300))
            case 2:
                begin = chance.randrange(len(donor) + 1)
                words[place:place] = donor[begin : begin + chance.choice((1, 5, 40))]
            case 3:
                words[place:place] = [" ", chance.choice(names), chance.choice((": ", " { ", " "))]
            case 4:
                words[place:place] = chance.choice((["{ "] * 3000, ["[ "] * 3000, ["} "] * 3, ['"']))
            case _:
                _replace(chance, words, names)
    data = "".join(words).encode(errors="surrogatepass")
    return mutated_bytes(chance, data) if chance.randrange(10) == 0 else data


def _replace(chance: random.Random, words: list[str], names: list[str]) -> None:
    """One number, string or name becomes another."""
    places = [place for place, word in enumerate(words) if word[0].isalnum() or word[0] in '"-']
    if not places:
        return
    place = chance.choice(places)
    if words[place].startswith('"'):
        words[place] = json.dumps(chance.choice(TEXTS))
    elif words[place].lstrip("-").isdecimal():
        words[place] = str(chance.choice(NUMBERS))
    else:
        words[place] = chance.choice((*names, "TYPE_INVALID", "KIND_MODEL", "nan", "1e400", "99999"))


class Configurations:
    """The fuzzer (`fuzzing.Fuzzer`)."""

    at_once = 1
    memory_bytes_max = 512 << 20
    health_s_max = 60.0
    """Of the machine's slowness: what is asked for takes milliseconds."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._turn = asyncio.Lock()
        self._texts, self._names = seeds(), field_names()
        self._trees: list[Any] = [json.loads(to_json(parse_text(text, "seed"))) for text in self._texts]
        self.accepted = 0

    def attacked(self) -> list[int]:
        return [self._process.pid]

    async def attack(self, chance: random.Random) -> None:
        if chance.random() < 0.5:
            answer = await self._ask(Question(text=mutated_text(chance, self._texts, self._names)))
        else:
            answer = await self._ask(Question(override=mutated_json(chance, chance.choice(self._trees))))
        self.accepted += answer.accepted
        assert not answer.problem, answer.problem

    async def health(self) -> None:
        assert Answer(accepted=True) == await self._ask(Question(text=PLAIN))

    async def _ask(self, question: Question) -> Answer:
        assert self._process.stdin is not None and self._process.stdout is not None
        async with self._turn:
            self._process.stdin.write(msgspec.json.encode(question) + b"\n")
            line = await self._process.stdout.readline()
        assert line, "the process that reads configurations has ended"
        return msgspec.json.decode(line, type=Answer)


@asynccontextmanager
async def fuzzer(folder: Path) -> AsyncGenerator[Configurations]:
    """Starts the process that reads configurations."""
    process = await asyncio.create_subprocess_exec(
        *tethered([sys.executable, "-m", "tests.fuzz.configurations", str(folder)], signal.SIGKILL),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        limit=1 << 20,
    )
    assert process.stdin is not None
    try:
        yield Configurations(process)
    finally:
        process.stdin.close()
        await process.wait()


def main(folder: Path) -> None:
    """Answers questions until there are no more."""
    model = folder / "model"
    (model / "1").mkdir(parents=True)
    for file in ("1/model.py", "1/model.pt", "batchstrategy.py", "labels.txt"):
        (model / file).touch()
    for line in sys.stdin.buffer:
        answer = judge(model, msgspec.json.decode(line, type=Question))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


def judge(model: Path, question: Question) -> Answer:
    """Reads a configuration as an executor does; says what should not have come of it."""
    file = model / "config.pbtxt"
    file.unlink(missing_ok=True)
    if question.text is not None:
        file.write_bytes(question.text)
    try:
        json_text = _accept(model, question.override)
    except MeshError as error:
        return Answer(accepted=False, problem=_problem_of(error))
    except Exception as error:  # noqa: BLE001 - every other one is what is looked for
        return Answer(accepted=False, problem=f"not refused in order: {error!r}"[:ERROR_CHARACTERS_MAX])
    try:
        again = _accept(model, json_text)
    except Exception as error:  # noqa: BLE001 - as above
        return Answer(accepted=True, problem=f"accepted, but not its own JSON: {error!r}"[:ERROR_CHARACTERS_MAX])
    return Answer(accepted=True, problem="" if again == json_text else "its own JSON means something else")


def _accept(model: Path, override: str | None) -> str:
    """Returns the JSON of an accepted configuration. Raises what reading it raises."""
    backends: dict[str, AutoComplete] = {"python": _unchanged, "pytorch": _unchanged}
    loaded = load_model_config(model, backends=backends, gpu_count=GPUS, override_json=override)
    record = ModelRecord(loaded.config, loaded.json, tuple(map(str, loaded.versions)))
    back = msgspec.json.decode(msgspec.json.encode(record), type=ModelRecord)
    assert back == record, "what gateways are told differs from what was read"
    return loaded.json


def _unchanged(config_json: str, version_dir: Path) -> str:
    return config_json


def _problem_of(error: MeshError) -> str:
    if not isinstance(error, ConfigError):
        return f"refused as something else: {error!r}"
    if not 0 < len(error.message) <= 2 * ERROR_CHARACTERS_MAX:
        return f"refused with {len(error.message)} characters: {error.message[:200]}"
    error.message.encode()
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
