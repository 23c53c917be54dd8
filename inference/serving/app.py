"""The FastAPI application: which routes there are, and what each does with its request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from inference.clients.pipeline import ModelPipeline
from inference.contract import model_name_of
from inference.contract.faults import error_body
from inference.contract.frames import MEDIA_TYPE
from inference.contract.messages import Invocation, ModelMetadata, ModelRequest, parse_invocation, parse_request
from inference.contract.validation import parse_numbers
from inference.errors import BadRequest, DeadlineExceeded, DeviceBroken, InferenceError
from inference.models.sample import Mode
from inference.models.server_model import BaseServerModel
from inference.serving import openapi
from inference.serving.batches import answer_batch
from inference.serving.gate import GONE, Call, Gate, call_of, error_response
from inference.serving.metrics import Metrics
from inference.serving.models import Models, ModelTable
from inference.serving.settings import ServiceSettings

log = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Service:
    """What the routes share; `app.state.service`.

    Attributes:
        on_broken: called once a device cannot be used any more, or a model does not load.
    """

    def __init__(self, models: Models, settings: ServiceSettings) -> None:
        self.settings = settings
        self.models = ModelTable(models, self._start)
        self.metrics = Metrics(self.models)
        self.on_broken: Callable[[], None] = lambda: None

    def find(self, name: str, call: Call) -> ModelPipeline:
        """The model that a request is for, noted in its record."""
        pipeline = self.models[name]
        call.model, call.digest = model_name_of(name), pipeline.model.manifest.sha256
        return pipeline

    def _start(self, model: BaseServerModel) -> ModelPipeline:
        largest = model.fixed_batch or model.manifest.max_batch
        settings = self.settings
        return ModelPipeline(
            model,
            min(settings.max_batch_size, largest),
            settings.max_wait_ms,
            stuck_after_s=settings.stuck_after_s,
            max_queued_items=settings.max_queued_items,
        )


def create_app(models: Models, settings: ServiceSettings | None = None) -> FastAPI:
    """The service as an ASGI application.

    Args:
        models: loaded models, or functions that load them, by name; these are called after the start, while `/ping`
            says that the service is not ready.
    """
    service = Service(models, settings or ServiceSettings())

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        service.models.load(on_failure=lambda: service.on_broken())
        yield
        await asyncio.to_thread(service.models.close)

    app = FastAPI(
        title="slide-inference",
        version=openapi.VERSION,
        docs_url=None,
        redoc_url=None,
        lifespan=life,
        redirect_slashes=False,
    )
    app.state.service = service
    app.router.route_class = _Route
    _add_routes(app.router, service)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_middleware(Gate, settings=service.settings, observe=service.metrics.observe)
    page = cache(lambda: openapi.page(app.openapi()))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page())

    return app


def _add_routes(router: APIRouter, service: Service) -> None:
    for name, mode in openapi.MODES.items():
        router.add_api_route(
            f"/api/{name}/{{model}}", _tile_route(service, mode), methods=["POST"], **openapi.tile(name, mode)
        )
    for add, path, handler, documented in (
        (router.post, "/invocations", _invoke, openapi.INVOCATIONS),
        (router.post, "/api/batch/{model}", _batch, openapi.BATCH),
        (router.get, "/api/metadata/{model}", _metadata, openapi.METADATA),
        (router.put, "/api/bulk-rna/{sha256}", _register_bulk_rna, openapi.BULK_RNA),
        (router.get, "/ping", _ping, openapi.PING),
        (router.get, "/metrics", _metrics, openapi.METRICS),
    ):
        add(path, **documented)(_bound(handler, service))


def _bound(handler: Callable[[Service, Request], Coroutine[Any, Any, Response]], service: Service) -> Handler:
    async def bound(request: Request) -> Response:
        return await handler(service, request)

    return bound


def _tile_route(service: Service, mode: Mode) -> Handler:
    async def tile(request: Request) -> Response:
        call = call_of(request)
        name = request.path_params["model"]
        pipeline = service.find(name, call)
        body = await request.body()

        def read() -> ModelRequest:
            found = parse_request(body, call.request_id)
            call.slide, call.tiles = found.slide_name, 1
            # A head is chosen by this name.
            return found if found.model_name else found.model_copy(update={"model_name": name})

        return _json(await pipeline.answer(read, mode, deadline_s=call.remaining_s))

    return tile


async def _invoke(service: Service, request: Request) -> Response:
    call = call_of(request)
    found = await asyncio.to_thread(parse_invocation, await request.body(), call.request_id)
    assert found.model_name is not None
    assert found.mode is not None
    pipeline = service.find(found.model_name, call)
    if isinstance(found, Invocation):
        return _described(pipeline)
    call.slide, call.tiles = found.slide_name, 1
    mode = pipeline.model.check_mode(found.mode)
    return _json(await pipeline.answer(lambda: found, mode, deadline_s=call.remaining_s))


async def _batch(service: Service, request: Request) -> Response:
    call = call_of(request)
    name = request.path_params["model"]
    pipeline = service.find(name, call)
    body = await request.body()
    content = await answer_batch(pipeline, name, body, call, service.settings.max_tile_bytes)
    return Response(content, media_type=MEDIA_TYPE)


async def _metadata(service: Service, request: Request) -> Response:
    return _described(service.find(request.path_params["model"], call_of(request)))


async def _register_bulk_rna(service: Service, request: Request) -> Response:
    values = await asyncio.to_thread(parse_numbers, await request.body())
    models = await service.models.register_bulk_rna(request.path_params["sha256"], values)
    return JSONResponse({"models": models})


async def _ping(service: Service, request: Request) -> Response:
    if fault := service.models.fault:
        return error_response(fault, call_of(request))
    return JSONResponse({"status": "ok", "models": list(service.models.names)})


async def _metrics(service: Service, _request: Request) -> Response:
    return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _described(pipeline: ModelPipeline) -> Response:
    metadata: ModelMetadata = pipeline.model.get_metadata()
    return _json(metadata.model_dump_json())


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


class _Route(APIRoute):
    """Answers every request, whatever its handler raises: in time, and to nobody if the caller has left."""

    def get_route_handler(self) -> Handler:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            call = call_of(request)
            try:
                return await _in_time(handler, request, call)
            except InferenceError as error:
                if isinstance(error, DeviceBroken):
                    request.app.state.service.on_broken()
                return error_response(error, call)
            except ClientDisconnect:
                call.status = GONE
                return Response(status_code=GONE)
            except Exception as error:
                log.exception("request %s failed", call.request_id)
                reason = InferenceError(f"the service failed: see request {call.request_id} in its log")
                call.detail = type(error).__name__
                return error_response(reason, call)

        return answer


async def _in_time(handler: Handler, request: Request, call: Call) -> Response:
    """The handler's response; it is cancelled at the deadline, or once the caller is gone.

    Raises:
        DeadlineExceeded: there was none in time.
        ClientDisconnect: nobody waits for it.
    """
    late = DeadlineExceeded("not answered before the deadline: allow more time or send less at once")
    try:
        await asyncio.wait_for(request.body(), call.remaining_s)
    except TimeoutError:
        raise late from None
    work, gone = asyncio.ensure_future(handler(request)), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({work, gone}, timeout=call.remaining_s, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return work.result()
        if gone.done():
            raise ClientDisconnect
        raise late
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    call = call_of(request)
    call.code = str(error.detail).lower().replace(" ", "_")
    body = error_body(BadRequest(f"{error.detail}: see /docs for what there is"), call.request_id)
    return JSONResponse(body.model_dump() | {"code": call.code}, error.status_code, error.headers)
