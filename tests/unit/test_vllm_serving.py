"""vLLM's adapter before servers that fail in every way that was seen (answers recorded from vLLM 0.32), the files that no server is
asked to load, and the command that starts the real one."""

import json
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_support import settings_of
from vllm_support import WORDS, write_lora

from spanloop.collectors.gateway_targets import upstream_urls
from spanloop.learner.audit import Audit
from spanloop.learner.deployment import Deployment
from spanloop.learner.model import Tolerance
from spanloop.learner.serving.http import HttpServing
from spanloop.learner.serving.lora_files import WEIGHTS, check_lora
from spanloop.learner.serving.vllm import VllmServing, serving_of, serving_urls
from spanloop.learner.serving.vllm_replica import running_loras
from spanloop.learner.serving.vllm_server import (
    check_model,
    end_leftovers,
    vllm_command,
    vllm_environment,
    vllm_python,
)
from spanloop.pipeline.supervisor import VLLM, child_specs
from spanloop.schemas.errors import ConfigError, SchemaError, StaleError, TransientError
from spanloop.schemas.settings import load_settings

BASE = {"hidden_size": 8, "intermediate_size": 16, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}  # fmt: skip
WORKER = "Call to add_lora method failed: Worker failed with error '{}', please check the stack trace above for the root cause"


def error(status, message):
    return status, {"error": {"message": message, "type": "x", "param": None, "code": status}}


class Stub:
    """vLLM's routes. Scores of a version come from the number in its name; ``answers`` replaces a route's next answers."""

    def __init__(self):
        self.loaded = {}
        self.answers = {}
        self.calls = []
        self.weights = {}
        """Name -> the name whose weights it really has."""
        self.processed = True
        self.running = []
        """What /metrics says next: lists of names."""
        self.fetches = {}
        """Versions that a resolver would find: path by name."""

    def handle(self, method, path, body):
        self.calls.append((path, body))
        if self.answers.get(path):
            return self.answers[path].pop(0)
        return getattr(self, path.rpartition("/")[2])(body or {})

    def models(self, _):
        cards = [{"id": "policy-base", "root": "/base", "parent": None}]
        cards += [{"id": n, "root": p, "parent": "policy-base"} for n, p in self.loaded.items()]
        return 200, {"object": "list", "data": cards}

    def load_lora_adapter(self, body):
        self.loaded[body["lora_name"]] = body["lora_path"]
        return 200, "Success: LoRA adapter added successfully."

    def unload_lora_adapter(self, body):
        if self.loaded.pop(body["lora_name"], None) is None:
            return error(404, "The lora adapter cannot be found.")
        return 200, "Success"

    def completions(self, body):
        if body["model"] in self.fetches:
            self.loaded.setdefault(body["model"], self.fetches[body["model"]])
        if body["model"] not in self.loaded:
            return error(404, f"The model `{body['model']}` does not exist.")
        seed = int(self.weights.get(body["model"], body["model"]).rpartition("v")[2])
        if "allowed_token_ids" in body:
            return 200, {
                "choices": [{"index": 0, "logprobs": {"token_logprobs": [0.0 if self.processed else -3.2]}}]
            }
        if "logprob_token_ids" not in body:
            return 200, {"choices": [{"index": 0, "text": ""}]}
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            top = {f"token_id:{t}": -0.01 * (seed + t + len(prompt)) for t in body["logprob_token_ids"]}
            choices.append({"index": index, "logprobs": {"top_logprobs": [top]}})
        return 200, {"choices": choices[::-1]}

    def metrics(self, _):
        names = ",".join(self.running.pop(0) if self.running else [])
        return (
            200,
            f'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{names}",waiting_lora_adapters=""}} 1.7e+09\n',
        )


@contextmanager
def serve(stub):
    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            answer = stub.handle(self.command, self.path, body)
            if answer is None:  # no answer at all
                self.close_connection = True
                return
            status, content = answer
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


@pytest.fixture
def pair():
    """Two servers and the adapter that makes them act as one."""
    with ExitStack() as stack:
        stubs = [Stub(), Stub()]
        urls = [stack.enter_context(serve(stub)) for stub in stubs]
        yield *stubs, VllmServing(urls, timeout_s=5.0, sleep=lambda _: None)


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASE))
    return folder


@pytest.fixture
def lora(base, tmp_path):
    return lambda version: write_lora(tmp_path / f"policy@v{version}", base, version)


# ---------------------------------------------------------------- all or none


def test_a_version_is_loaded_and_unloaded_everywhere(pair, lora):
    a, b, serving = pair
    folder = lora(8)
    serving.load("policy@v8", folder)
    serving.load("policy@v8", folder)
    assert a.loaded == b.loaded == {"policy@v8": str(folder)}
    assert serving.loaded() == ["policy@v8"]
    assert serving.probe("policy@v8", [[1, 2, 3]])[0] == pytest.approx([-0.11, -0.13])
    serving.unload("policy@v8")
    assert a.loaded == b.loaded == {}


FAILURES = {
    "refused": (error(500, WORKER.format("The size of tensor a (64) must match the size of tensor b (128)")), SchemaError, "refuses policy@v8: The size"),
    "rank": (error(500, WORKER.format("LoRA rank 32 is greater than max_lora_rank 16.")), SchemaError, "larger --max-lora-rank"),
    "no such path": (error(404, "Loading lora policy@v8 failed: No adapter found for /x"), SchemaError, "under the same path"),
    "no answer": (None, TransientError, "cannot be reached"),
    "out of memory": (error(500, WORKER.format("CUDA out of memory")), TransientError, "failed to load"),
    "dead": (error(500, "EngineCore encountered an issue. See stack trace (above) for the root cause."), TransientError, "its log says more"),
    "no route": ((404, {"detail": "Not Found"}), TransientError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    "no lora": (error(500, WORKER.format("LoRA is not enabled. Use --enable-lora to enable LoRA.")), TransientError, "--enable-lora"),
    "key": ((401, {"error": "Unauthorized"}), TransientError, "gateway.upstream_key"),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_where_one_server_fails_none_serves(pair, lora, failure):
    a, b, serving = pair
    serving.load("policy@v7", lora(7))
    answer, kind, says = FAILURES[failure]
    b.answers["/v1/load_lora_adapter"] = [answer]
    folder = lora(8)
    with pytest.raises(kind, match=says):
        serving.load("policy@v8", folder)
    assert list(a.loaded) == list(b.loaded) == ["policy@v7"]
    serving.load("policy@v8", folder)
    assert serving.loaded() == ["policy@v7", "policy@v8"]


def test_case_37_one_of_two_servers_keeps_the_old_weights(pair, lora):
    a, b, serving = pair
    serving.load("policy@v7", lora(7))
    folder = lora(8)
    for answer in (error(400, "shape mismatch"), None):
        b.answers["/v1/load_lora_adapter"] = [answer]
        with pytest.raises((SchemaError, TransientError)):
            serving.load("policy@v8", folder)
        assert list(a.loaded) == list(b.loaded) == ["policy@v7"]
    b.weights["policy@v8"] = "policy@v7"  # 200, but it answers as before
    with pytest.raises(SchemaError, match="answers differently"):
        serving.load("policy@v8", folder)
    assert list(a.loaded) == list(b.loaded) == ["policy@v7"]
    b.weights.clear()
    b.answers["/v1/load_lora_adapter"] = [(200, "Success")]  # said, not done
    with pytest.raises(SchemaError, match="no such model"):
        serving.load("policy@v8", folder)
    assert list(a.loaded) == list(b.loaded) == ["policy@v7"]


class _Weights:
    """What the learner's own numbers for a version are, by the stub's rule."""

    config = SimpleNamespace(vocabulary_size=50, context=8)
    tolerance = Tolerance(1e-3, 1e-2)

    def __init__(self, version):
        self.version = version

    def probe(self, prompts):
        return [[-0.01 * (self.version + t + n) for n, t in enumerate(p[1:], 1)] for p in prompts]


def test_an_audit_finds_what_servers_answer_for_a_version_later(pair, lora):
    a, b, serving = pair
    folders = {version: lora(version) for version in (7, 8)}
    deployment = Deployment(serving, "policy", net=_Weights, folder=folders.__getitem__)  # type: ignore[arg-type]
    assert all(deployment.ensure(version) for version in folders)
    audit, raised = Audit(deployment, "policy", every_s=60, place=None), []

    def at(second):
        raised.clear()
        assert audit.step({8}, {7, 8}, second * 10**9, raised.append)
        return [m.reason for m in raised]

    assert at(0) == []
    assert not audit.step({8}, {7, 8}, 59 * 10**9, raised.append)
    b.weights["policy@v8"] = "policy@v7"  # one was restarted with other files
    (reason,) = at(60)
    assert "policy@v8 cannot be shown to serve: " in reason
    assert "answers differently" in reason
    a.weights["policy@v8"] = "policy@v7"
    (reason,) = at(120)
    assert (
        "what serves as policy@v8 answers as policy@v7 does: its log-probabilities differ by 0.01 nats"
        in reason
    )
    a.weights["policy@v8"] = b.weights["policy@v8"] = "policy@v99"
    (reason,) = at(180)
    assert "answers as no known version does" in reason
    a.weights.clear()
    b.weights.clear()
    b.loaded.clear()  # restarted without any: loaded again by its name
    assert at(240) == []
    assert b.loaded == {"policy@v8": str(folders[8])}


def test_a_server_that_is_away_is_found_out_before_anything_changes(lora):
    stub = Stub()
    with serve(stub) as url:
        serving = VllmServing([url, "http://127.0.0.1:1"], timeout_s=1.0, sleep=lambda _: None)
        with pytest.raises(TransientError, match=r"127\.0\.0\.1:1"):
            serving.load("policy@v1", lora(1))
    assert {path for path, _ in stub.calls} == {"/v1/models"}


def test_a_name_is_one_artifact_for_ever(pair, lora):
    a, _, serving = pair
    one, two = lora(1), lora(2)
    serving.load("policy@v1", one)
    with pytest.raises(StaleError, match="use a new name"):
        serving.load("policy@v1", two)
    a.loaded["policy@v2"] = str(one)  # known to one of them only
    with pytest.raises(StaleError, match="use a new name"):
        serving.load("policy@v2", two)
    # a request for the name was quicker than the load
    a.loaded["policy@v3"] = str(one)
    a.answers["/v1/models"] = [(200, {"data": []})]
    a.answers["/v1/load_lora_adapter"] = [error(400, "has already been loaded")]
    with pytest.raises(StaleError, match="use a new name"):
        serving.load("policy@v3", two)


def test_log_probabilities_of_another_distribution_are_found_out(pair, lora):
    a, b, serving = pair
    b.processed = False
    with pytest.raises(TransientError, match="--logprobs-mode processed_logprobs"):
        serving.load("policy@v1", lora(1))
    assert a.loaded == b.loaded == {}


def test_short_failures_are_tried_again(pair, lora):
    a, _, serving = pair
    a.answers["/v1/models"] = [error(503, "starting"), error(503, "starting")]
    a.answers["/v1/completions"] = [error(500, "busy")]
    serving.load("policy@v1", lora(1))
    assert serving.loaded() == ["policy@v1"]


@pytest.mark.parametrize("odd", [{}, {"choices": [{"index": 0, "logprobs": None}]}, {"choices": 3}, "text"])
def test_odd_scores(pair, lora, odd):
    a, _, serving = pair
    serving.load("policy@v1", lora(1))
    a.answers["/v1/completions"] = [(200, odd)]
    with pytest.raises(SchemaError, match="vLLM's shape"):
        serving.probe("policy@v1", [[1, 2]])


def test_scores_that_are_not_numbers(pair, lora):
    a, _, serving = pair
    serving.load("policy@v1", lora(1))
    a.answers["/v1/completions"] = [
        (200, '{"choices": [{"index": 0, "logprobs": {"top_logprobs": [{"token_id:2": 1e999}]}}]}')
    ]
    with pytest.raises(SchemaError, match=r"vLLM's shape|not finite"):
        serving.probe("policy@v1", [[1, 2]])


def test_unloading_waits_for_running_requests_and_reaches_all(pair, lora):
    a, b, serving = pair
    serving.load("policy@v1", lora(1))
    a.running = [["policy@v1", "policy@v2"], ["policy@v1"], ["policy@v2"]]
    asked = len(a.calls)
    b.answers["/v1/unload_lora_adapter"] = [error(400, "locked")]
    with pytest.raises(SchemaError, match="does not unload policy@v1: locked"):
        serving.unload("policy@v1")
    assert [path for path, _ in a.calls[asked:]].count("/metrics") == 3
    assert a.loaded == {}
    assert serving.loaded() == []
    b.answers["/metrics"] = [(404, "not here")]
    serving.unload("policy@v1")
    assert b.loaded == {}


def test_the_newest_sample_says_what_runs():
    line = 'vllm:lora_requests_info{{max_lora="4",running_lora_adapters="{}",waiting_lora_adapters="{}"}} {}'
    text = "\n".join(
        [line.format("", "", "3e9"), line.format("a@v1,a@v2", "a@v3", "4e9"), line.format("a@v9", "", "2e9")]
    )
    assert running_loras(text) == {"a@v1", "a@v2", "a@v3"}
    assert running_loras("# HELP vllm:lora_requests_info Running") is None


def test_urls():
    with pytest.raises(ConfigError, match="at least one"):
        VllmServing([])
    with pytest.raises(ConfigError, match="twice"):
        VllmServing(["http://a:1", "http://a:1/v1"])
    with pytest.raises(ConfigError, match="http://host:port"):
        VllmServing(["https://a:1"])


# ---------------------------------------------------------------- files that no server is asked to load


def damaged(folder, **change):
    tensors = load_file(folder / WEIGHTS)
    name = next(iter(tensors))
    match change:
        case {"nan": True}:
            tensors[name][0, 0] = float("nan")
        case {"drop": True}:
            del tensors[name]
        case {"empty": True}:
            tensors = {}
        case {"foreign": True}:
            tensors["head.weight"] = torch.zeros(2)
        case {"shape": True}:
            tensors[name] = torch.zeros(3, 5)
    save_file(tensors, folder / WEIGHTS)


def config(folder, **values):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


BROKEN = {
    "not a number": (lambda f: damaged(f, nan=True), "not finite"),
    "half missing": (lambda f: damaged(f, drop=True), "has only its lora_"),
    "empty": (lambda f: damaged(f, empty=True), "is empty"),
    "foreign": (lambda f: damaged(f, foreign=True), "not a LoRA matrix"),
    "shape": (lambda f: damaged(f, shape=True), "do not fit each other"),
    "cut off": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-40]), "corrupt"),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), WEIGHTS),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "adapter_config.json"),
    "config is no JSON": (lambda f: (f / "adapter_config.json").write_text("{"), "not JSON"),
    "config is a list": (lambda f: (f / "adapter_config.json").write_text("[]"), "not a JSON object"),
    "another method": (lambda f: config(f, peft_type="IA3"), "expected peft_type LORA"),
    "dora": (lambda f: config(f, use_dora=True), "train without it"),
    "saved modules": (lambda f: config(f, modules_to_save=["lm_head"]), "train without it"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_files_reach_no_server(pair, lora, how):
    a, b, serving = pair
    folder = lora(8)
    breaking, says = BROKEN[how]
    breaking(folder)
    with pytest.raises(SchemaError, match=says):
        serving.load("policy@v8", folder)
    assert {path for path, _ in (*a.calls, *b.calls)} <= {"/v1/models"}


def test_a_good_file_tells_its_facts(lora, base, tmp_path):
    facts = check_lora(lora(1))
    assert (facts.rank, facts.base, facts.modules) == (4, str(base), 5)
    with pytest.raises(SchemaError, match="there is no adapter folder"):
        check_lora(tmp_path / "nowhere")


# ---------------------------------------------------------------- settings and the real server's command


def vllm_settings(tmp_path, **sections):
    sections["serving"] = {"engine": "vllm", "port": 9001, **sections.get("serving", {})}
    return load_settings(flags={"workspace": str(tmp_path), **sections})


def test_the_engine_chooses_the_adapter(tmp_path):
    settings = settings_of(tmp_path)
    assert isinstance(serving_of(settings), HttpServing)
    assert serving_urls(settings) == ("http://127.0.0.1:0",)
    settings = vllm_settings(tmp_path)
    assert isinstance(serving_of(settings), VllmServing)
    assert serving_urls(settings) == ("http://127.0.0.1:9001",)
    assert upstream_urls(settings) == ("http://127.0.0.1:9001/v1",)
    many = vllm_settings(tmp_path, serving={"urls": ["http://a:1", "http://b:2/v1/"]})
    assert serving_urls(many) == ("http://a:1", "http://b:2/v1/")
    assert upstream_urls(many) == ("http://a:1/v1", "http://b:2/v1")
    balancer = vllm_settings(
        tmp_path, serving={"urls": ["http://a:1"]}, gateway={"upstream": "http://lb:9/v1"}
    )
    assert upstream_urls(balancer) == ("http://lb:9/v1",)
    assert serving_urls(balancer) == ("http://a:1",)


def test_up_starts_vllm_where_it_is_the_engine(tmp_path):
    settings = vllm_settings(tmp_path, learner={"model": "base"})
    commands = {spec.name: spec.command for spec in child_specs(settings, None, ())}
    assert VLLM in commands["serving"]
    elsewhere = vllm_settings(tmp_path, learner={"model": "base"}, serving={"urls": ["http://a:1"]})
    assert "serving" not in {spec.name for spec in child_specs(elsewhere, None, ())}


def test_the_command_and_the_environment(tmp_path):
    settings = vllm_settings(
        tmp_path, serving={"vllm_args": ["--max-model-len", "512"], "threads": 3}, learner={"lora_rank": 12}
    )
    command = vllm_command(settings, python="/venv/python", model="base", port=9001, cpu=True)
    text = " ".join(command)
    for part in (
        "/venv/python -m vllm.entrypoints.openai.api_server --model base --served-model-name policy-base",
        "--host 127.0.0.1 --port 9001", "--enable-lora", "--max-lora-rank 16", "--logprobs-mode processed_logprobs",
        "--generation-config vllm", "--dtype float32", "--logits-processors spanloop_exploration:ExplorationFloor",
    ):  # fmt: skip
        assert part in text
    assert command[-2:] == ["--max-model-len", "512"]
    assert "lm_head" not in text
    gpu = vllm_command(settings, python="p", model="base", port=1, cpu=False)
    assert "--dtype" not in gpu
    environment = vllm_environment(
        settings, {"PATH": "/bin", "SPANLOOP_GATEWAY__UPSTREAM_KEY": "secret", "OMP_NUM_THREADS": "1"},
        policies=tmp_path, cpu=True,
    )  # fmt: skip
    assert "SPANLOOP_GATEWAY__UPSTREAM_KEY" not in environment
    assert (environment["PATH"], environment["OMP_NUM_THREADS"]) == ("/bin", "3")
    assert environment["VLLM_LORA_RESOLVER_CACHE_DIR"] == str(tmp_path)
    assert (Path(environment["PYTHONPATH"]) / "spanloop_exploration.py").exists()
    for name in ("HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"):
        assert environment[name] == "1"


def test_a_server_that_fetches_from_mlflow_gets_its_plugin(tmp_path):
    def environment(**learner):
        settings = load_settings(flags={"serving": {"adapters": "mlflow"}, "learner": learner})
        return vllm_environment(settings, {}, policies=tmp_path / "policies", cpu=False)

    found = environment(tracking_uri="http://mlflow:5000")
    assert found["VLLM_PLUGINS"] == "spanloop_mlflow"
    assert found["SPANLOOP_MLFLOW_URI"] == "http://mlflow:5000"
    code = (
        "from importlib.metadata import entry_points\n"
        "(one,) = [e for e in entry_points(group='vllm.general_plugins') if e.name == 'spanloop_mlflow']\n"
        "one.load()(); import spanloop_exploration_is_beside_it"
    )
    (tmp_path / "vllm" / "spanloop_exploration_is_beside_it.py").write_text("import sys; sys.exit(7)")
    assert (tmp_path / "vllm" / "spanloop_exploration.py").exists()
    child = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": found["PYTHONPATH"]}, check=False, timeout=60
    )
    assert child.returncode == 7
    with pytest.raises(ConfigError, match=r"tracking_uri is empty: name the http\(s\) URL"):
        environment()


def test_versions_that_servers_fetch_by_name(lora):
    path = lora(1)
    first, second = Stub(), Stub()
    with serve(first) as url, serve(second) as other:
        serving = VllmServing([url, other], timeout_s=5.0, by_name=True, sleep=lambda _: None)
        for server in (first, second):
            server.fetches = {"policy@v1": "/somewhere/else/policy@v1"}
        serving.load("policy@v1", path)
        assert serving.loaded() == ["policy@v1"]
        serving.load("policy@v1", path)
        assert not any(route.endswith("/load_lora_adapter") for route, _ in first.calls + second.calls)
        serving.unload("policy@v1")
        second.fetches = {}
        with pytest.raises(TransientError, match=r"does not get policy@v1 from MLflow \(404\)"):
            serving.load("policy@v1", path)
        assert first.loaded == {}  # all or nothing
        second.answers["/v1/completions"] = [
            error(400, "LoRA adapter 'policy@v1' was found but could not be loaded.")
        ]
        with pytest.raises(SchemaError, match="was found but could not be loaded"):
            serving.load("policy@v1", path)
        first.loaded["policy@v1"] = "/somewhere/else/policy@v2"
        with pytest.raises(StaleError):
            serving.load("policy@v1", path)


def test_where_vllm_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="make vllm-env"):
        vllm_python({})
    with pytest.raises(ConfigError, match="not an executable"):
        vllm_python({"SPANLOOP_VLLM_PYTHON": str(tmp_path) + "/none"})
    local = tmp_path / ".venv-vllm" / "bin" / "python"
    local.parent.mkdir(parents=True)
    local.write_text("#!/bin/sh\n")
    assert vllm_python({}) == str(local)
    local.chmod(0o755)
    assert vllm_python({"SPANLOOP_VLLM_PYTHON": str(local)}) == str(local)


def test_models_that_cannot_be_served(base, tmp_path):
    with pytest.raises(ConfigError, match="heads of 4"):
        check_model(str(base), cpu=True)
    check_model(str(base), cpu=False)
    with pytest.raises(ConfigError, match="not a Hugging Face model folder"):
        check_model(str(tmp_path / "none"), cpu=True)
    (base / "config.json").write_text("x")
    with pytest.raises(ConfigError, match="not JSON"):
        check_model(str(base), cpu=True)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_leftovers_of_a_killed_run_are_ended(tmp_path):
    command = [
        sys.executable,
        "-c",
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    ]
    left = subprocess.Popen([*command, "vllm"], start_new_session=True)
    other = subprocess.Popen([*command, "vllm"], start_new_session=True)
    try:
        (tmp_path / "vllm.group").write_text(str(left.pid))
        end_leftovers(tmp_path / "vllm.group", patience_s=0.1)
        assert left.wait(5) == -signal.SIGKILL
        assert other.poll() is None
        end_leftovers(tmp_path / "vllm.group")
        end_leftovers(tmp_path / "none")
    finally:
        other.kill()
        other.wait(5)


def test_no_word_begins_another():
    assert not [(a, b) for a in WORDS for b in WORDS if a != b and b.startswith(a)]
