"""The contract of clients, in this process, over an application in this process, and over a port."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from inference.clients import HttpClient
from inference.contract import Client
from inference.models.server_model import BaseServerModel
from tests.inference.clients.conformance import ClientContract, Connect
from tests.inference.clients.doubles import Loopback

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartClient, StartService


class TestInProcess(ClientContract):
    @pytest.fixture
    def connect(self, start: "StartClient") -> Connect:
        return start


class TestOverAsgi(ClientContract):
    @pytest.fixture
    def connect(self, serve: "StartService", runtime: "ScriptedRuntime") -> Iterator[Connect]:
        clients: list[HttpClient] = []

        def make(model: BaseServerModel | None = None, **settings: object) -> Client:
            transport = httpx.ASGITransport(serve([model] if model else None, **settings))
            clients.append(HttpClient("http://service", "demo", max_retries=0, transport=transport))
            return clients[-1]

        yield make
        runtime.release()
        for client in clients:
            client.close()


class TestOverLoopback(ClientContract):
    @pytest.fixture
    def connect(self, serve: "StartService", runtime: "ScriptedRuntime") -> Iterator[Connect]:
        clients: list[HttpClient] = []
        services: list[Loopback] = []

        def make(model: BaseServerModel | None = None, **settings: object) -> Client:
            services.append(Loopback(serve([model] if model else None, **settings)))
            clients.append(HttpClient(services[-1].url, "demo", max_retries=0))
            return clients[-1]

        yield make
        runtime.release()
        for client in clients:
            client.close()
        for service in services:
            service.stop()
