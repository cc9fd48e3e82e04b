"""A provisioned NVFlare system on this machine: mutual TLS, a killed site, a stranger, a site that disagrees.

Slow: it starts a server and four sites, once for all of it.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from conform.cases import distance
from engine import sites_own
from fedbilevel.engine import TooFewClientsError
from fedbilevel.engine.agreement import fingerprint
from fedbilevel.engine.configuration import agreed_parts
from fedbilevel.engine.nvflare.engine import NVFlare
from fedbilevel.engine.nvflare.premises import Premises
from fedbilevel.engine.nvflare.settings import write_settings
from fedbilevel.portable import pack

pytest.importorskip("nvflare")
pytestmark = [
    pytest.mark.slow,
    # Of NVFlare's own threads in this process:
    pytest.mark.filterwarnings("ignore:ssl_context is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:nvflare.*"),
]
SITES = ("site-1", "site-2", "site-3")
SAMPLES = "engine.sites_own:samples"


def algorithm(lr: float = 0.05) -> fb.FedAvg:
    return fb.FedAvg(lr, steps=2)


def problem() -> fb.Problem:
    return fb.single_level(distance, jnp.ones(3))


def agreed(lr: float) -> Any:
    return fingerprint(*pack(agreed_parts(problem(), algorithm(lr).among(3).on(problem()), ())))


@pytest.fixture(scope="module")
def premises(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Premises]:
    """Three sites that agreed to one experiment, and a fourth with a certificate of another authority."""
    premises, other = (
        Premises([*SITES, "site-4"], folder=tmp_path_factory.mktemp(name)) for name in ("system", "other")
    )
    for name in ("client.crt", "client.key"):
        shutil.copy(other.kits / "site-4" / "startup" / name, premises.kits / "site-4" / "startup" / name)
    for site in SITES:
        write_settings(premises.kits / site / "local", data=SAMPLES, agreed=[agreed(0.05)])
    premises.start()
    yield premises
    premises.close()


def test_a_real_federation(premises: Premises) -> None:
    """One story, since starting is what takes the time."""
    known = fb.Clients([sites_own.samples(site)["lower"] for site in SITES], weights="size")
    with NVFlare(premises.admin, sites=SITES, timeout=60.0, retries=0, min_clients=2) as engine:
        clients = engine.clients(weights="size")
        assert not np.any(clients.lower.flat), "no sample has left its site"

        # All is well: the result is the simulator's.
        whole = fb.solve(problem(), known, algorithm(), 6, every=1)
        result = fb.solve(problem(), clients, algorithm(), 6, engine=engine, every=1)
        np.testing.assert_allclose(result.x, whole.x, rtol=1e-5)
        assert result.ledger == whole.ledger
        assert not result.failures

        # Another configuration than the agreed one is refused, and the difference is named.
        with pytest.raises(TooFewClientsError, match=r"algorithm\.lr is 0\.5 at the server and 0\.05 here"):
            fb.solve(problem(), clients, algorithm(0.5), 1, engine=engine)

        # A site is killed in the middle: the others go on as if it weighed nothing.
        def kill(seen: Any) -> None:
            if seen.row["step"] == 2:
                premises.kill("site-2")

        assert engine._sites is not None
        engine._sites.timeout = 10.0
        cut = fb.solve(problem(), clients, algorithm(), 6, engine=engine, every=1, callback=kill)
        assert not cut.diverged
        assert all("(site-2)" in line for line in cut.failures)
        without = fb.Clients(known.lower, weights=[3.0, 0.0, 5.0])
        first = fb.solve(problem(), known, algorithm(), 2, every=1)
        rest = fb.solve(problem(), without, algorithm(), 4, every=1, start=first)
        np.testing.assert_allclose(cut.x, rest.x, rtol=1e-5)
        assert cut.history.column("failures")[-1] >= 1

        # It comes back with the next job.
        premises.start("site-2")
        _wait_for(engine, "site-2")
        back = fb.solve(problem(), clients, algorithm(), 6, engine=engine, every=1)
        np.testing.assert_allclose(back.x, whole.x, rtol=1e-5)
        assert not back.failures

    _check_stranger(premises)


def _wait_for(engine: NVFlare, site: str) -> None:
    deadline = time.monotonic() + 120
    while engine._sites is not None and site not in engine._sites.returned():
        assert time.monotonic() < deadline, f"{site} did not come back"
        time.sleep(1.0)


def _check_stranger(premises: Premises) -> None:
    """The site with a certificate of another authority was there all the time, and never got in."""
    server = (premises.kits / "localhost" / "console.log").read_text()
    assert "New client site-1" in server
    assert "New client site-4" not in server
    assert _answer(premises, "site-1").startswith(b"HTTP"), "a certificate of our authority opens the door"
    assert _answer(premises, "site-4") == b"", "another one does not"


def _answer(premises: Premises, site: str) -> bytes:
    """What the server answers to somebody with a site's certificate: nothing, if it hangs up."""
    startup = premises.kits / site / "startup"
    target = json.loads((startup / "fed_client.json").read_text())["servers"][0]["service"]["target"]
    host, port = target.split(":")
    context = ssl.create_default_context(cafile=str(premises.kits / "localhost" / "startup" / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    plain = socket.create_connection((host, int(port)), 10)
    with (
        contextlib.suppress(ssl.SSLError, ConnectionError),
        plain,
        context.wrap_socket(plain, server_hostname=host) as line,
    ):
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return line.recv(64)
    return b""


def test_the_kits_hold_what_they_should(premises: Premises) -> None:
    """Nobody else's key is in a kit, and the policy allows our two classes and not any."""
    keys = list(premises.kits.rglob("*.key"))
    assert len({path.read_bytes() for path in keys}) == len(keys)
    policy = pathlib.Path(premises.kits / "site-1" / "local" / "resources.json").read_text()
    assert "fedbilevel.engine.nvflare.parties" in policy
    assert '"*"' not in policy
