"""The console in a real Chromium, on a mesh of real processes: what people see, and the kill."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

from shared.contract.ids import SequenceId, sequence_id
from tests.mesh.conftest import remember
from tests.mesh.model_repository import add_sum_model
from tests.mesh.running_mesh import PATIENCE_S, RunningMesh, eventually, running_mesh
from tests.mesh.traffic import GrpcCaller, Step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
MARKUP = "<b onclick=alert(1)>bold</b>"
NAMES = ("alice", "queen", "hatter", "rabbit", MARKUP)
PATIENCE_MS = PATIENCE_S * 1000
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")


@pytest.fixture(scope="module")
def mesh_with_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    folder = tmp_path_factory.mktemp("console")
    add_sum_model(folder / "models", "sum", slots=8, virtual_slots=False)
    with running_mesh(folder / "mesh", [folder / "models"], executors=2, console=True) as mesh:
        yield mesh


@pytest.fixture
def mesh(request: pytest.FixtureRequest, mesh_with_console: RunningMesh) -> RunningMesh:
    return remember(request, mesh_with_console)


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        await browser.close()


async def opened(browser: Browser, address: str, problems: list[str]) -> Page:
    """A page on the console; what it complains of, also its security policy, is gathered."""
    page = await browser.new_page(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda said: problems.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    await page.goto(address)
    return page


async def barriers(page: Page) -> str:
    """What keeps somebody with a screen reader, a keyboard alone or weak eyes from the page, by axe; "" for nothing."""
    found = await Axe().run(page)
    return found.generate_report() if found.violations_count else ""


async def test_an_executor_is_killed_on_the_page_and_its_sequences_go_on_elsewhere(
    mesh: RunningMesh, browser: Browser
) -> None:
    expect.set_options(timeout=PATIENCE_MS)
    problems: list[str] = []
    (address,) = re.findall(r"console (http://\S+#token=[\w-]+);", mesh.log("launcher"))
    caller = GrpcCaller(mesh.grpc())
    for name in NAMES:
        await caller("sum", Step(name, 1, start=True))
    page = await opened(browser, address, problems)

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

    await caller.close()
    await eventually(lambda: len(mesh.alive()) == 2, f"{victim} is back")
    assert [] == problems


def sequence_of(name: str) -> SequenceId:
    return sequence_id("sum", "", name)


async def test_without_the_token_the_page_shows_and_does_not_act_on_a_phone_in_the_dark_too(
    mesh: RunningMesh, browser: Browser
) -> None:
    expect.set_options(timeout=PATIENCE_MS)
    (address,) = re.findall(r"console (http://\S+)#token=[\w-]+;", mesh.log("launcher"))
    page = await browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")

    await page.goto(address)

    await expect(page.get_by_text("No sequence lives.")).to_be_visible()
    await page.get_by_role("button", name="Kill executor-1").click()
    await page.get_by_label("Token").fill("a wrong one")
    await page.get_by_role("dialog").get_by_role("button", name="Sign in").click()
    await expect(page.get_by_text("This is not the token of this console.")).to_be_visible()
    await page.keyboard.press("Escape")
    for name in ("Sequences", "Models", "Events", "Overview"):
        await page.get_by_role("link", name=name, exact=True).click()
        await expect(page.locator("h1")).to_have_count(1)
        width = await page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{name} is wider than a phone"
        assert "" == await barriers(page)
    background = await page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert "rgb(18, 20, 23)" == background
    assert {"executor-1", "executor-2"} == {one.name for one in mesh.alive()}
