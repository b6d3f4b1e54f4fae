"""https with certificates made here: versions, clients' certificates, and files that change."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from kvasir.errors import ConfigError
from kvasir.serve.settings import ServeSettings
from tests.serve.auth.test_reload import until
from tests.serve.running import live

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="no openssl to make certificates with")


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


def make(folder: Path, name: str, days: str = "2", names: str = "IP:127.0.0.1") -> SimpleNamespace:
    """A certificate that signed itself, for these names, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName={names}")
    new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", days)
    openssl(*new, "-keyout", str(key), "-out", str(cert), *subject)
    return SimpleNamespace(cert=cert, key=key)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    return {name: make(folder, name) for name in ("one", "two", "client")}


def trusting(pair: SimpleNamespace, client: SimpleNamespace | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pair.cert)
    if client:
        context.load_cert_chain(client.cert, client.key)
    return context


def get(server, context: ssl.SSLContext) -> httpx.Response:
    url = server.url.replace("http://", "https://")
    return httpx.get(f"{url}/v1/models", verify=context, trust_env=False)


def test_https_with_the_server_s_certificate(made):
    with live(ServeSettings(port=0, tls_cert=made["one"].cert, tls_key=made["one"].key)) as server:
        assert get(server, trusting(made["one"])).json()["object"] == "list"
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            get(server, trusting(made["two"]))
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{server.url}/v1/models")
        body = {"prompt": "ab", "max_tokens": 3, "stream": True}
        url = server.url.replace("http://", "https://")
        with httpx.stream("POST", f"{url}/v1/completions", json=body, verify=trusting(made["one"])) as response:
            assert "[DONE]" in response.read().decode()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_old_versions_are_refused(made):
    with live(ServeSettings(port=0, tls_cert=made["one"].cert, tls_key=made["one"].key)) as server:
        for version, good in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            context = trusting(made["one"])
            context.set_ciphers("DEFAULT:@SECLEVEL=0")
            context.minimum_version = context.maximum_version = version
            if good:
                assert get(server, context).status_code == 200
            else:
                with pytest.raises(httpx.ConnectError):
                    get(server, context)


@pytest.mark.parametrize("reply", [b"", b"\x16\x03\x01\x02\x00", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_connection_without_a_handshake_is_closed(made, reply):
    files = {"tls_cert": made["one"].cert, "tls_key": made["one"].key}
    with live(ServeSettings(port=0, head_time=0.3, **files)) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=20) as silent, contextlib.suppress(ConnectionError):
            silent.sendall(reply)
            while silent.recv(1000):
                pass
        assert get(server, trusting(made["one"])).status_code == 200


def test_client_certificates_are_required_if_configured(made):
    files = {"tls_cert": made["one"].cert, "tls_key": made["one"].key, "tls_ca": made["client"].cert}
    with live(ServeSettings(port=0, **files)) as server:
        assert get(server, trusting(made["one"], made["client"])).status_code == 200
        for stranger in (None, made["two"]):
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError, httpx.WriteError)):
                get(server, trusting(made["one"], stranger))


def test_a_new_certificate_is_loaded_and_a_broken_one_is_ignored(made, tmp_path, caplog):
    files = SimpleNamespace(cert=tmp_path / "cert", key=tmp_path / "key")

    def put(cert: Path, key: Path) -> None:
        for source, target in ((cert, files.cert), (key, files.key)):
            new = target.with_suffix(".new")
            shutil.copy(source, new)
            new.rename(target)

    put(made["one"].cert, made["one"].key)
    with live(ServeSettings(port=0, tls_cert=files.cert, tls_key=files.key)) as server:
        assert get(server, trusting(made["one"])).status_code == 200
        put(made["two"].cert, made["one"].key)  # does not fit
        until(lambda: "stays in force" in caplog.text)
        assert get(server, trusting(made["one"])).status_code == 200
        put(made["two"].cert, made["two"].key)

        def taken() -> bool:
            try:
                return get(server, trusting(made["two"])).status_code == 200
            except httpx.ConnectError:
                return False

        until(taken)


def test_no_connection_is_lost_while_certificates_change(made):
    files = {"tls_cert": made["one"].cert, "tls_key": made["one"].key}
    with live(ServeSettings(port=0, **files)) as server:
        context, done = trusting(made["one"]), False

        async def renew() -> None:
            while not done:
                await asyncio.gather(server.server.renew_tls(), server.server.renew_tls())

        renewing = asyncio.run_coroutine_threadsafe(renew(), server.loop)
        try:
            assert {get(server, context).status_code for _ in range(60)} == {200}
        finally:
            done = True
            renewing.result(20)
        assert len(server.server.servers) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "version", [pytest.param(ssl.TLSVersion.TLSv1_2, marks=pytest.mark.slow), ssl.TLSVersion.TLSv1_3]
)
def test_certificate_authorities_can_change_while_the_server_runs(made, tmp_path, caplog, version):
    """Whose authority is gone gets in no more, not by a session of before either, nor on a connection of before."""
    ca = tmp_path / "ca"

    def put(text: str) -> None:
        ca.with_suffix(".new").write_text(text)
        ca.with_suffix(".new").rename(ca)

    def connect(context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> ssl.SSLSocket:
        raw = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
        return context.wrap_socket(raw, server_hostname="127.0.0.1", session=session)

    def ask(open: ssl.SSLSocket) -> bytes:
        open.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}") and (more := open.recv(1000)):
            answer += more
        return answer

    def let_in(pair: SimpleNamespace) -> bool:
        try:
            return get(server, trusting(made["one"], pair)).status_code == 200
        except (httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError, httpx.WriteError):
            return False

    first, second = made["client"], made["two"]
    put(first.cert.read_text())
    files = {"tls_cert": made["one"].cert, "tls_key": made["one"].key, "tls_ca": ca}
    with live(ServeSettings(port=0, **files)) as server:
        context = trusting(made["one"], first)
        context.maximum_version = version
        with connect(context) as before:
            assert ask(before).startswith(b"HTTP/1.1 200")
            session = before.session
            assert let_in(first) and not let_in(second)
            put("nothing")
            until(lambda: "stays in force" in caplog.text)
            assert let_in(first) and ask(before).startswith(b"HTTP/1.1 200")
            put(first.cert.read_text() + second.cert.read_text())
            until(lambda: let_in(second))
            assert let_in(first)
            put(second.cert.read_text())
            until(lambda: not let_in(first))
            assert let_in(second)
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                while before.recv(1000):
                    pass
            with pytest.raises((ConnectionError, ssl.SSLError)), connect(context, session) as again:
                if not ask(again):
                    raise ConnectionError


def still_answers(open: ssl.SSLSocket) -> bool:
    try:
        open.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return bool(open.recv(1000))
    except (ConnectionError, ssl.SSLError):
        return False


@pytest.mark.slow
def test_a_handshake_during_the_removal_of_its_authority_is_closed(made, tmp_path):
    ca = tmp_path / "ca"
    shutil.copy(made["client"].cert, ca)
    files = {"tls_cert": made["one"].cert, "tls_key": made["one"].key, "tls_ca": ca}
    with live(ServeSettings(port=0, head_time=2.0, **files)) as server:
        get(server, trusting(made["one"], made["client"]))  # the server is past its start
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=20) as raw:
            for _ in range(5):  # turns of its loop, in which it takes the connection
                server.ask(asyncio.sleep(0))
            ca.write_text(made["two"].cert.read_text())
            server.ask(server.server.renew_tls())
            context = trusting(made["one"], made["client"])
            with context.wrap_socket(raw, server_hostname="127.0.0.1") as open:
                until(lambda: not still_answers(open))
        assert get(server, trusting(made["one"], made["two"])).status_code == 200


def test_unusable_tls_files_are_refused_at_startup(made, tmp_path):
    one, empty, locked = made["one"], tmp_path / "empty", tmp_path / "locked"
    empty.write_text("")
    openssl("ec", "-in", str(one.key), "-out", str(locked), "-aes128", "-passout", "pass:word")
    for cert, key, ca, reply in (
        (one.cert, made["two"].key, None, "key values mismatch"),
        (empty, one.key, None, "PEM"),
        (one.cert, tmp_path / "absent", None, "No such file"),
        (one.cert, locked, None, "encrypted"),
        (one.cert, one.key, empty, "PEM"),
    ):
        settings = ServeSettings(tls_cert=cert, tls_key=key, tls_ca=ca)
        with pytest.raises(ConfigError, match=reply):
            settings.tls.context()
    for files in ({"tls_cert": one.cert}, {"tls_key": one.key}, {"tls_ca": one.cert}):
        with pytest.raises(ConfigError, match="its key"):
            ServeSettings(**files)
