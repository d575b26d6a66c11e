"""Credentials of the store from a service account's identity in a cloud: exchanged, renewed, refused in a sentence."""

import hashlib
import json
import logging
import os
import re
import time
import traceback
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs

import loopback
import pytest
import urllib3.util.connection

from sidgraft import storage
from sidgraft.storage import StorageError

ROLE = "arn:aws:iam::1:role/runs"
TOKEN = "eyJ.the-token-of-this-account.sig"
CONTENT = b"what is in the store"
REFUSAL = (
    "<ErrorResponse><Error><Type>Sender</Type><Code>InvalidIdentityToken</Code>\n"
    "<Message>Incorrect token audience</Message></Error></ErrorResponse>"
)


class Cloud:
    """A token service, an agent and a store in one server; each exchange gives the next key, and only that reads."""

    def __init__(self):
        self.token, self.seconds, self.given, self.asked = TOKEN, 3600.0, 0, []
        self.answer = None  # instead of an exchange: status and body

    def keys(self):
        self.given += 1
        ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.seconds))
        return {"AccessKeyId": f"KEY{self.given}", "SecretAccessKey": "secret", "Expiration": ends}

    def exchange(self, form):
        """What AssumeRoleWithWebIdentity answers: the form's names and the answer's as AWS documents them."""
        self.asked.append(form)
        if self.answer:
            return self.answer
        if form["Action"] != "AssumeRoleWithWebIdentity" or form["WebIdentityToken"] != self.token:
            return 400, REFUSAL
        values = self.keys() | {"SessionToken": f"session{self.given}"}
        inner = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
        name, space = "AssumeRoleWithWebIdentity", "https://sts.amazonaws.com/doc/2011-06-15/"
        result = f"<{name}Result><Credentials>{inner}</Credentials></{name}Result>"
        return 200, f'<{name}Response xmlns="{space}">{result}</{name}Response>'

    def hand_out(self, path, token):
        """What the agent of pod identities or of ECS answers."""
        self.asked.append((path, token))
        if self.answer:
            return self.answer
        if token != self.token:
            return 403, "[7c]: (AccessDeniedException): Unauthorized Exception!\n"
        return 200, json.dumps(self.keys() | {"Token": f"session{self.given}"})

    def may_read(self, headers):
        signed = f"Credential=KEY{self.given}/" in headers.get("Authorization", "")
        return signed and headers.get("X-Amz-Security-Token") == f"session{self.given}"


class Handler(BaseHTTPRequestHandler):
    cloud = Cloud()  # each test has its own

    def log_message(self, *_):
        pass

    def send(self, status, body, headers=None):
        body = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_POST(self):
        assert "?" not in self.path  # a token in the address would be in every log on the way
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode(), strict_parsing=True)
        self.send(*self.cloud.exchange({name: value for name, (value,) in form.items()}))

    def do_GET(self):
        if not self.path.startswith("/shop/"):
            self.send(*self.cloud.hand_out(self.path, self.headers.get("Authorization")))
        elif self.cloud.may_read(self.headers):
            digest = hashlib.sha256(CONTENT).hexdigest()
            told = {"ETag": '"1"', "Last-Modified": "Wed, 01 Jan 2025 00:00:00 GMT", "x-amz-meta-sha256": digest}
            self.send(200, CONTENT, told)
        else:
            self.send(403, "<Error><Code>AccessDenied</Code></Error>", {"Content-Type": "application/xml"})

    do_HEAD = do_GET


@pytest.fixture(scope="module")
def address():
    with loopback.serving(Handler) as address:
        yield address


@pytest.fixture
def cloud(address, monkeypatch, tmp_path):
    """The cloud at `address`; neither that nor the `file` of the token is in a variable yet. There are no keys."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", address)
    monkeypatch.setattr(storage, "TRIES", 0)
    storage._connect.cache_clear()
    cloud = Cloud()
    cloud.address, cloud.file = address, tmp_path / "token"
    cloud.file.write_text(TOKEN)
    monkeypatch.setattr(Handler, "cloud", cloud)
    yield cloud
    storage._connect.cache_clear()


@pytest.fixture
def web_identity(cloud, monkeypatch):
    """As the webhook of EKS sets it up for an account with a role, but for the address of the token service."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", cloud.address)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(cloud.file))
    monkeypatch.setenv("AWS_ROLE_ARN", ROLE)
    return cloud


@pytest.fixture
def pod_identity(cloud, monkeypatch):
    """As pod identities of EKS are set up, but for the agent's address; the file ends in a new line."""
    cloud.file.write_text(TOKEN + "\n")
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.address}/v1/credentials")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(cloud.file))
    return cloud


def read():
    return storage.read_text("s3://shop/x").encode()


def refused():
    """The sentence that reading ends in; neither it nor what led to it shows the token."""
    with pytest.raises(StorageError) as caught:
        read()
    assert TOKEN not in "".join(traceback.format_exception(caught.value))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_web_identity_is_exchanged_once_and_its_token_shows_nowhere(web_identity, caplog):
    caplog.set_level(logging.DEBUG)
    assert read() == CONTENT
    assert read() == CONTENT
    (form,) = web_identity.asked
    assert (form["WebIdentityToken"], form["RoleArn"], form["Version"]) == (TOKEN, ROLE, "2011-06-15")
    assert TOKEN not in caplog.text


def test_an_address_for_all_services_is_also_that_of_the_token_service(web_identity, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", web_identity.address)
    monkeypatch.delenv("AWS_ENDPOINT_URL_STS")
    assert read() == CONTENT
    assert len(web_identity.asked) == 1


def test_credentials_about_to_end_are_renewed_with_the_token_as_it_is_then(web_identity):
    web_identity.seconds = 5  # less than what the client leaves to a request
    assert read() == CONTENT
    before = len(web_identity.asked)
    web_identity.token = "the-next-token"
    web_identity.file.write_text(web_identity.token)
    web_identity.seconds = 3600
    assert read() == CONTENT
    assert read() == CONTENT
    assert [form["WebIdentityToken"] for form in web_identity.asked[before:]] == ["the-next-token"]


def test_an_agent_hands_out_credentials_and_is_asked_again_when_they_end(pod_identity):
    pod_identity.seconds = 5
    assert read() == CONTENT
    before = len(pod_identity.asked)
    pod_identity.seconds = 3600
    assert read() == CONTENT
    assert read() == CONTENT
    assert pod_identity.asked[before:] == [("/v1/credentials", TOKEN)]


def test_an_agent_on_loopback_needs_no_token_and_another_host_does(cloud, monkeypatch):
    cloud.token = None
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{cloud.address}/v1/credentials")
    assert read() == CONTENT
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", "http://192.0.2.1/v1/credentials")
    said = refused()
    assert "AWS_CONTAINER_CREDENTIALS_FULL_URI gives no credentials for the object store (192.0.2.1 is not loop" in said


def test_the_agent_of_ecs_is_at_its_fixed_address(cloud, monkeypatch):
    connect = urllib3.util.connection.create_connection

    def redirected(address, *rest, **named):
        if address[0] == "169.254.170.2":
            assert address[1] == 80
            host, _, port = cloud.address.removeprefix("http://").partition(":")
            address = (host, int(port))
        return connect(address, *rest, **named)

    monkeypatch.setattr(urllib3.util.connection, "create_connection", redirected)
    monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "/v2/credentials/1")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", TOKEN)
    assert read() == CONTENT
    assert cloud.asked == [("/v2/credentials/1", TOKEN)]


def test_a_token_that_is_refused_is_told_in_the_services_own_words(web_identity):
    web_identity.token = "another"
    said = refused()
    host = web_identity.address.removeprefix("http://")
    assert said == (
        f"{host} gives this service account no credentials for the object store (400, InvalidIdentityToken: Incorrect"
        " token audience): check that the account has a role, and that the role trusts it."
    )


def test_what_an_agent_refuses_is_told(pod_identity):
    pod_identity.token = "another"
    assert "(403, [7c]: (AccessDeniedException): Unauthorized Exception!): check that the account has a r" in refused()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((200, "<html>a gateway"), r"AWS_WEB_IDENTITY_TOKEN_FILE gives no credentials .*\(.+\): correct it, or set"),
        ((200, "<a/>"), r"AWS_WEB_IDENTITY_TOKEN_FILE gives no credentials .*AssumeRoleWithWebIdentityResult"),
        ((503, ""), r"gives this service account no credentials .*\(503, without a word\)"),
        ((302, ""), r"gives this service account no credentials .*\(302, without a word\)"),
    ],
)
def test_an_answer_that_is_none_is_told(web_identity, answer, expected):
    web_identity.answer = answer
    said = refused()
    assert re.search(expected, said), said


def test_an_agents_answer_that_lacks_a_part_is_told(pod_identity):
    pod_identity.answer = (200, '{"AccessKeyId": "a", "SecretAccessKey": "b", "Expiration": "2030-01-01T00:00:00Z"}')
    assert "FULL_URI gives no credentials for the object store (the answer has no 'Token'): correct it" in refused()


def test_a_token_service_that_does_not_answer_is_told(web_identity, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:9")
    assert refused().startswith("no answer from 127.0.0.1:9, which gives this service account's credentials for the ob")


@pytest.mark.parametrize("kind", ["web_identity", "pod_identity"])
def test_a_token_file_that_is_not_there_is_told(request, kind):
    cloud = request.getfixturevalue(kind)
    cloud.file.unlink()
    assert str(cloud.file) in refused()


def test_a_role_that_may_not_read_is_told(web_identity, monkeypatch):
    monkeypatch.setattr(Cloud, "may_read", lambda *_: False)
    assert "refuses the credentials (AccessDenied)" in refused()
    assert "or the role of the service account, and that they may read and write the bucket shop" in refused()


def test_keys_come_before_an_identity_with_their_sessions_token(web_identity, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "KEY0")  # what the server takes before any exchange
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session0")
    assert read() == CONTENT
    assert web_identity.asked == []
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    assert "refuses the credentials" in refused()


def test_without_keys_or_identity_both_are_named(cloud):
    assert "set AWS_ACCESS_KEY_ID and" in refused()
    assert "or give the service account a role (docs/storage.md)" in refused()
