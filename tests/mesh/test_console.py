"""The console in a real Chromium, on a mesh of real processes: what people see, and the kill."""

from __future__ import annotations

import asyncio
import itertools
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from shared.contract.ids import SequenceId, sequence_id
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually, running_mesh, wait
from tests.mesh.traffic import GrpcCaller, Step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MARKUP = "<b onclick=alert(1)>bold</b>"
NAMES = ("alice", "queen", "hatter", "rabbit", MARKUP)
PATIENCE_MS = PATIENCE_S * 1000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("console")
    add_sum_model(folder / "models", "sum", slots=8, virtual_slots=False)
    # A busy machine must not look like a dead executor; nor is a sequence of a killed one moved, for the sake of even
    # load, before its lease has ended.
    settings = {"SEQMESH_LEASE_MS": "3000", "SEQMESH_BOUNDED_LOAD": "1000"}
    with running_mesh(folder / "mesh", [folder / "models"], executors=2, console=True, environment=settings) as mesh:
        yield mesh


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


@pytest.fixture
def console(mesh: RunningMesh) -> str:
    """Its address, with the token."""
    # Said when the mesh is ready, and the mesh is used as soon as its state says so.
    (address,) = wait(
        lambda: re.findall(r"console (http://\S+#token=[\w-]+);", mesh.log("launcher")), "the launcher names it"
    )
    return address


Visit = Callable[[str], Awaitable[Page]]


@pytest.fixture
async def visit(browser: Browser) -> AsyncIterator[Visit]:
    """Opens a page of the console. In the end none may have complained, nor its security policy."""
    problems: list[str] = []

    async def opened(address: str) -> Page:
        page = await browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
        page.set_default_timeout(PATIENCE_MS)
        page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(address)
        return page

    yield opened
    assert [] == problems


@pytest.fixture
async def caller(mesh: RunningMesh) -> AsyncIterator[GrpcCaller]:
    caller = GrpcCaller(mesh.grpc())
    yield caller
    await caller.close()


async def barriers(page: Page) -> str:
    """What keeps somebody with a screen reader, a keyboard alone or weak eyes from the page, by axe; "" for nothing."""
    found = await Axe().run(page)
    return found.generate_report() if found.violations_count else ""


async def test_an_executor_is_killed_on_the_page_and_its_sequences_go_on_elsewhere(
    mesh: RunningMesh, visit: Visit, console: str, caller: GrpcCaller
) -> None:
    for name in NAMES:
        await caller("sum", Step(name, 1, start=True))
    page = await visit(console)

    # What lives is seen, by the names that clients gave, whatever stands in them.
    for name in NAMES:
        await expect(page.locator(f"[data-sequence={name!r}]")).to_be_visible()
    assert 0 == await page.locator("main b", has_text="bold").count()
    assert "token" not in page.url
    assert "" == await barriers(page)

    # One is searched and looked at.
    await page.get_by_role("link", name="Sequences").click()
    await page.get_by_label("Id, as the client gives it").fill("alice")
    await page.get_by_role("button", name="Search").click()
    await page.get_by_role("link", name="alice", exact=True).click()
    await expect(page.get_by_role("heading", name="Sequence alice")).to_be_visible()
    await expect(page.get_by_text("START was accepted")).to_be_visible()
    assert "" == await barriers(page)
    owner = mesh.record(sequence_of("alice"))["ow"]
    victim = owner.rpartition("-")[0]
    held = mesh.loads("sum")[victim]

    # Its executor is killed, with the keyboard.
    await page.get_by_role("link", name="Overview").click()
    await page.get_by_role("button", name=f"Kill {victim}").focus()
    await page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name=f"Kill {victim}?")
    await expect(dialog).to_be_visible()
    assert "" == await barriers(page)
    await dialog.get_by_role("button", name="Kill it").press("Enter")
    await expect(page.locator(f"[data-kill={victim!r}].good")).to_contain_text(
        "goes on elsewhere" if held == 1 else f"{held} of its {held} sequences go on elsewhere"
    )
    await expect(page.get_by_text("taken over from an executor that was lost")).to_be_visible()

    # It went on where it was, and its story says so.
    for name in NAMES:
        assert 3 == await caller("sum", Step(name, 2, end=name != "alice"))
    await page.get_by_role("link", name="Sequences").click()
    await page.get_by_role("link", name="alice", exact=True).click()
    await expect(page.get_by_text(f"Taken over from {owner}, which is gone")).to_be_visible()
    assert 6 == await caller("sum", Step("alice", 3, end=True))
    await expect(page.get_by_text("The step with END is committed.")).to_be_visible()

    await eventually(lambda: len(mesh.alive()) == 2, f"{victim} is back")
    # A page would show it twice: alive, and as the one that is gone.
    await eventually(lambda: mesh.redis.hlen(mesh.keys.executors) == 2, "the killed one is forgotten")


def sequence_of(name: str) -> SequenceId:
    return sequence_id("sum", "", name)


async def test_a_sequence_is_paused_moved_and_ended_on_the_page_and_an_executor_drained(
    mesh: RunningMesh, visit: Visit, console: str, caller: GrpcCaller
) -> None:
    number = 2**63 - 5  # More than the 53 bits of a browser's numbers.
    for name in (MARKUP, number):
        await caller("sum", Step(name, 1, start=True))
    page = await visit(console)
    second = await visit(console)
    for each in (page, second):
        await each.locator(f"[data-sequence={MARKUP!r}]").click()
    said = page.locator(".notice")

    # Paused, its step waits; resumed, it is answered.
    await page.get_by_role("button", name="Pause …").click()
    assert "" == await barriers(page)
    await page.get_by_role("button", name="Pause it").click()
    await expect(said).to_contain_text(f"Sequence {MARKUP}: paused for 3600 s at most")
    await expect(second.get_by_text("An operator paused it")).to_be_visible()
    answer = asyncio.create_task(caller("sum", Step(MARKUP, 2)))
    await expect(page.get_by_text("2, 1 of them open")).to_be_visible()
    assert not answer.done()
    await second.get_by_role("button", name="Resume").click()
    assert 3 == await answer
    await page.get_by_role("button", name="Pause …").wait_for()

    # Moved by two people at once, it moves once.
    owner = mesh.record(sequence_of(MARKUP))["ow"]
    for each in (page, second):
        await each.get_by_role("button", name="Move …").click()
    for each in (page, second):
        await each.get_by_role("button", name="Move it").click()
    for each in (page, second):
        await expect(each.locator(".notice")).to_contain_text(re.compile("moved from|has left"))
    there = {await each.locator(".notice").inner_text() for each in (page, second)}
    other = mesh.record(sequence_of(MARKUP))["ow"]
    assert owner != other
    assert {f"moved from {owner} to {other}", f"the sequence has left {owner} already: it is on {other}"} == {
        text.partition(": ")[2].partition(".\n")[0] for text in there
    }
    assert 6 == await caller("sum", Step(MARKUP, 3))

    # Ended by two people, it is over, and both are told so.
    for each in (page, second):
        await each.get_by_role("button", name="End …").click()
    # Both at once: a page that shows that the sequence is over offers no end of it any more.
    await asyncio.gather(*(each.get_by_role("button", name="End it").click() for each in (page, second)))
    for each in (page, second):
        await expect(each.locator(".notice")).to_contain_text(re.compile("ends now|was over already"))
    await expect(page.get_by_text("The sequence was cancelled.")).to_be_visible()
    await expect(page.get_by_role("button", name="End …")).to_have_count(0)

    # A number that a browser would round is found and ended.
    await page.get_by_role("link", name="Overview").click()
    await page.locator(f"[data-sequence='{number}']").click()
    await page.get_by_role("button", name="End …").click()
    await page.get_by_role("button", name="End it").click()
    await expect(said).to_contain_text(f"Sequence {number}: ends now")

    # An executor is drained, is gone, and serves again.
    await page.get_by_role("link", name="Overview").click()
    await page.get_by_role("button", name="Drain executor-1").click()
    await page.get_by_role("button", name="Drain it").click()
    await eventually(lambda: {"executor-2"} == {one.name for one in mesh.alive()}, "executor-1 is drained")
    await expect(page.get_by_text("executor-1 is drained: it takes no sequence.")).to_be_visible()
    assert "" == await barriers(page)
    await page.get_by_role("button", name="Let executor-1 serve again").click()
    await expect(page.get_by_role("button", name="Drain executor-1")).to_be_visible()


async def test_an_executor_that_leaves_already_is_not_offered_for_draining(visit: Visit, console: str) -> None:
    page = await visit(console)
    await expect(page.get_by_role("button", name="Drain executor-1")).to_be_visible()

    # What the page hears of the first executor.
    await page.add_init_script("""
        const parse = JSON.parse;
        JSON.parse = (text) => parse(text.replace('"state":"serving"', '"state":"leaving"'));
    """)
    await page.reload()

    await expect(page.locator("[data-executor=executor-1]")).to_contain_text("leaving")
    await expect(page.get_by_role("button", name="Drain executor-2")).to_be_visible()
    await expect(page.get_by_role("button", name="Drain executor-1")).to_have_count(0)


async def test_the_buttons_of_an_executor_stand_side_by_side_on_a_small_phone(visit: Visit, console: str) -> None:
    page = await visit(console)
    await page.set_viewport_size({"width": 360, "height": 800})

    places = [await page.get_by_role("button", name=f"{word} executor-1").bounding_box() for word in ("Drain", "Kill")]
    assert 1 == len({place["y"] for place in places if place is not None})


async def test_long_names_widen_no_page_on_a_phone_and_an_id_keeps_its_line(
    visit: Visit, console: str, caller: GrpcCaller
) -> None:
    await caller("sum", Step("123456", 1, start=True))
    page = await visit(console)
    await page.set_viewport_size({"width": 390, "height": 844})
    # The model is called so in all that the page hears.
    await page.add_init_script("""
        const parse = JSON.parse, renamed = (key) => `"${key}":"${"a_name".repeat(30)}"`;
        JSON.parse = (text) =>
            parse(text.replaceAll('"model":"sum"', renamed("model")).replaceAll('"name":"sum"', renamed("name")));
    """)
    await page.reload()

    for name in ("Overview", "Models", "Sequences"):
        await page.get_by_role("link", name=name, exact=True).click()
        await expect(page.locator("h2, h4, td", has_text="a_name" * 30).first).to_be_visible()
        assert 390 >= await page.evaluate("document.documentElement.scrollWidth"), name
    place = await page.get_by_role("link", name='"123456"').bounding_box()
    assert place is not None
    assert place["width"] > 2 * place["height"]
    await caller("sum", Step("123456", 1, end=True))


async def test_who_kills_an_executor_with_more_sequences_than_are_followed_is_not_told_that_it_had_none(
    visit: Visit, console: str
) -> None:
    page = await visit(console)
    # What the page hears of a larger mesh, whose executor lives on.
    await page.add_init_script("""
        const parse = JSON.parse;
        JSON.parse = (text) => {
            const said = parse(text);
            if ("is_complete" in said) Object.assign(said, { is_complete: false, sequences: [] });
            for (const executor of said.executors ?? []) executor.models[0].held = 300;
            return said;
        };
    """)
    await page.route("**/api/executors/executor-1/kill", lambda route: route.fulfill(json={"text": "killed"}))
    await page.reload()

    await page.get_by_role("button", name="Kill executor-1").click()
    await expect(page.get_by_role("dialog")).to_contain_text("300 sequences")
    await page.get_by_role("button", name="Kill it").click()

    await expect(page.locator("[data-kill=executor-1]")).to_contain_text("too many to be followed one by one")


async def test_an_id_is_seen_for_what_it_is_and_its_command_is_safe_to_paste(
    visit: Visit, console: str, caller: GrpcCaller
) -> None:
    """Letters that are not seen, or turn others around, are written out; a shell runs nothing that a client wrote."""
    shown = {
        "\u202egnp.exe": (r'"\u202egnp.exe"', r"$'\u202egnp.exe'"),
        " $(reboot)'": ('" $(reboot)\'"', r"$' $(reboot)\''"),
        "42": ('"42"', "--string"),
        "two\nlines": (r'"two\u000alines"', r"$'two\u000alines'"),
    }
    for name in shown:
        await caller("sum", Step(name, 1, start=True))
    page = await visit(console)

    for name, (text, pasted) in shown.items():
        await page.goto(f"{console.partition('#')[0]}#/")
        await page.get_by_role("link", name=f"Sequence {text}:").click()
        await expect(page.locator("h1")).to_have_text(f"Sequence {text}")
        command = await page.locator("code", has_text="seqmesh trace").inner_text()
        assert pasted in command
        # A shell hands the very id on.
        told = await asyncio.create_subprocess_exec(
            "bash", "-c", f'seqmesh() {{ printf %s "${{!#}}"; }}; {command}', stdout=asyncio.subprocess.PIPE
        )
        assert name.encode() == (await told.communicate())[0]
    await page.goto(f"{console.partition('#')[0]}#/nowhere")
    await expect(page).to_have_title("Overview · seqmesh console")
    for name in shown:
        await caller("sum", Step(name, 0, end=True))


async def test_charts_of_a_model_show_its_phases_as_lines_and_as_tables(
    visit: Visit, console: str, caller: GrpcCaller
) -> None:
    page = await visit(f"{console.partition('#')[0]}#/models")
    await page.locator("[data-model=sum]").get_by_role("link", name="Charts").click()
    await expect(page.get_by_role("heading", name="Where the time goes")).to_be_visible()

    shown = page.locator("figure", has=page.get_by_role("heading", name="Checkpoint", exact=True))
    for value in itertools.count(1):
        await caller("sum", Step("charted", value, start=value == 1))
        if re.search(r"p50 [\d.]+ m?s", " ".join((await shown.inner_text()).split())):
            break
    await caller("sum", Step("charted", 1, end=True))
    await shown.get_by_text("As a table").click()
    await expect(shown.get_by_role("row").nth(1)).to_contain_text(re.compile(r"\d+:\d\d:\d\d\s*[\d.]+ m?s"))
    assert "" == await barriers(page)
    await page.get_by_role("button", name="1 hour").click()
    await expect(page).to_have_url(re.compile("model=sum&version=1&range=1h"))
    await expect(page.get_by_role("button", name="1 hour")).to_have_attribute("aria-pressed", "true")
    await page.get_by_label("Of", exact=True).select_option(label="the whole mesh")
    await expect(shown.get_by_text("p50").first).to_be_visible()


async def test_without_the_token_the_page_shows_and_does_not_act_on_a_phone_in_the_dark_too(
    mesh: RunningMesh, browser: Browser, console: str
) -> None:
    page = await browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")

    await page.goto(console.partition("#")[0])

    await expect(page.get_by_text("No sequence lives.")).to_be_visible()
    assert 0 == await page.get_by_role("button", name="Drain").count()
    await page.get_by_role("button", name="Kill executor-1").click()
    await page.get_by_label("Token").fill("a wrong one")
    await page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
    await expect(page.get_by_text("This is not the token of this console.")).to_be_visible()
    await page.keyboard.press("Escape")
    for name in ("Sequences", "Models", "Charts", "Events", "Overview"):
        await page.get_by_role("link", name=name, exact=True).click()
        await expect(page.locator("h1")).to_have_count(1)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{name} is wider than a phone"
        assert "" == await barriers(page)
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert "rgb(18, 20, 23)" == background
    assert {"executor-1", "executor-2"} == {one.name for one in mesh.alive()}
