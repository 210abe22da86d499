"""Settings of a deployment: one TOML file, one frozen model. Order: defaults < TOML < environment < flags.

Environment names are ``SPANLOOP_`` + section + ``__`` + field, e.g. ``SPANLOOP_COLLECTOR__PORT=4319``.
Unknown keys and malformed values are errors that name the key; nothing falls back in silence.
"""

from __future__ import annotations

import os
import re
import tomllib
from datetime import datetime
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, SettingsError

from spanloop.schemas.errors import ConfigError

__all__ = ["SPECIAL_WORDS", "Settings", "load_settings", "origins"]


SPECIAL_WORDS = ("<pad>", "<bos>", "<eos>", "<act>", "<unk>")
"""Words that precede the vocabulary in the embedded policy's tokenizer."""


TENANT = r"^[^/\x00-\x1f\x7f]{1,200}$"
"""Keys on the log are ``tenant/id``: with a slash in its name one tenant would be read as another."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Credential(_Section):
    """A key that a client sends as ``Authorization: Bearer KEY``. Rotate by listing the new one beside the old."""

    key: SecretStr
    tenant: str = Field("default", pattern=TENANT)
    role: str = Field(pattern="^(agent|scorer|reader|admin)$")
    """agent: may send spans and ask the gateway; scorer: may also send feedback; reader: may only read metrics; admin:
    everything."""
    expires: str = ""
    """From then on the key is refused: a time with a zone, such as 2027-01-31T00:00:00Z; empty: never."""

    @field_validator("expires", mode="before")
    @classmethod
    def _a_time_with_zone(cls, value: object) -> object:
        if value == "":
            return value
        try:
            when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        except ValueError:
            when = None
        if when is None or when.tzinfo is None:
            raise ValueError("expected a time with a zone, such as 2027-01-31T00:00:00Z")
        return when.isoformat()

    @property
    def expires_ns(self) -> int | None:
        """Nanoseconds since 1970; None: never."""
        return int(datetime.fromisoformat(self.expires).timestamp() * 1e9) if self.expires else None


class Collector(_Section):
    host: str = "127.0.0.1"
    """A public address is refused unless credentials are set."""
    port: int = Field(4318, ge=0, le=65535)
    grpc_port: int = Field(-1, ge=-1, le=65535)
    """Port of OTLP/gRPC on the same host; 0: any free one; -1: 4317 where port is 4318, else no gRPC."""
    max_body_bytes: int = Field(4 * 2**20, ge=1024)
    """Compressed body limit; more is answered 413."""
    max_expanded_bytes: int = Field(20 * 2**20, ge=1024)
    """Limit after decompression, checked while streaming."""
    max_spans_per_request: int = Field(10_000, ge=1)
    max_attribute_bytes: int = Field(64 * 2**10, ge=256)
    """A longer text is cut and flagged; token arrays of the gateway are exempt."""
    max_attributes: int = Field(2_048, ge=16)
    """Attributes of a span; of more the first by name are kept, those of GenAI conventions before others."""
    max_nesting: int = Field(64, ge=4)
    group_commit_ms: float = Field(5.0, ge=0)
    queue_max: int = Field(2_000, ge=1)
    """Requests waiting for the durable append; more are answered 429 with Retry-After."""
    read_timeout_s: float = Field(30.0, gt=0)
    """A body that takes longer to arrive is answered 408; a connection without a request is closed after as long."""

    @property
    def grpc(self) -> int | None:
        """Port of OTLP/gRPC; None: it is off."""
        if self.grpc_port >= 0:
            return self.grpc_port
        return 4317 if self.port == 4318 else None


class Content(_Section):
    """Message texts and token ids. The default keeps neither."""

    training: bool = False
    """Opt in: keep token ids, logprobs and texts, so that this deployment's traffic can train a policy."""
    hmac_key: SecretStr = SecretStr("")
    """Key of the hash left where a text was dropped; empty: made at first start and kept in the workspace."""
    allow: tuple[str, ...] = ()
    """Further attribute keys to keep (exact, or a prefix ending in *)."""
    subject_keys: bool = False
    """With training: texts and token ids reach the log only under a key for each trace, which `spanloop erase` destroys
    (docs/privacy.md). Needs the package cryptography."""
    subjects: tuple[str, ...] = (
        "user.id", "enduser.id", "enduser.pseudo.id", "langfuse.user.id", "session.id", "gen_ai.conversation.id",
        "conversation.id",
    )  # fmt: skip
    """Attributes of spans, log records and resources that say whom a trace is about."""
    keys: str = ""
    """File of the key store; empty: WORKSPACE/keys/subjects.db. Keep its back-ups apart from the log's, and short."""

    @model_validator(mode="after")
    def _keys_need_content(self) -> Content:
        if self.subject_keys and not self.training:
            raise ValueError(
                "content.subject_keys keeps content under keys, and content.training = false keeps none: set both"
            )
        return self

    @property
    def clear(self) -> bool:
        """Whether content is written as it came."""
        return self.training and not self.subject_keys


class GatewayUpstream(_Section):
    """Servers of somebody else, by the model's name."""

    models: tuple[str, ...] = Field(min_length=1)
    """Names, with * for any text: the first entry that fits is asked."""
    url: str = Field(pattern=r"^https?://[^\s@]+$")
    """Base URL of an OpenAI-compatible server, up to and with /v1."""
    key: SecretStr = SecretStr("")
    """Its key; empty: the client's own Authorization is passed on (docs/gateway.md says which header then carries ours)."""
    tokens: bool = False
    """It is a vLLM: where content.training is on, token ids and log-probabilities are asked for and taken out of the answer."""


class Gateway(_Section):
    enabled: bool = True
    host: str = "127.0.0.1"
    port: int = Field(8787, ge=0, le=65535)
    upstream: str = ""
    """Base URL of an OpenAI-compatible server (.../v1); empty: the embedded server of this workspace."""
    upstreams: tuple[GatewayUpstream, ...] = ()
    """Further servers, by the model's name ([[gateway.upstreams]]); what fits none goes to ``upstream``."""
    policy: str = "policy"
    """The alias that clients put in ``model``; other models are passed through."""
    decide_timeout_s: float = Field(0.5, gt=0)
    """Where /v1/decide has no answer from serving after so long, the caller gets its default option."""
    timeout_s: float = Field(600.0, gt=0)
    """Without a byte from the upstream for so long, a call ends: 504."""
    upstream_key: SecretStr = SecretStr("")
    """Key for the upstream; empty: the client's own Authorization is passed on, unless [[credentials]] are set."""
    passthrough: tuple[str, ...] = ()
    """Further paths below /v1 that go on unchanged and unrecorded, such as /v1/audio/speech or /v1/images/*."""
    queue_max: int = Field(20_000, ge=1)
    """Finished calls that wait in memory until they are spooled; more are counted as lost."""
    spool: str = ""
    """Folder where calls wait while the log is away; empty: WORKSPACE/spool."""
    spool_mb: float = Field(256.0, ge=1)
    """Its size; when it is full the oldest calls are dropped and counted."""
    spool_fsync_s: float = Field(1.0, ge=0)
    """What waits there survives kill -9 at once, and a power failure after so long. 0: fsync for each group of calls."""

    @field_validator("upstream")
    @classmethod
    def _is_url(cls, value: str) -> str:
        if value and not _UPSTREAM.fullmatch(value):
            raise ValueError(
                "the upstream is the base URL of a server: http://HOST/v1 or https://HOST/v1, or empty"
            )
        return value


class Serving(_Section):
    enabled: bool = True
    engine: str = Field("embedded", pattern="^(embedded|vllm)$")
    """embedded: the torch server of the small policy; vllm: vLLM with a LoRA adapter for each version (docs/serving.md)."""
    urls: tuple[str, ...] = ()
    """Base URLs of vLLM servers that run elsewhere: versions are loaded on all of them, the gateway spreads conversations over
    them. Empty: one server, started by `spanloop up` on host and port."""
    adapters: Literal["path", "mlflow"] = "path"
    """How vLLM servers get a version. path: they see the workspace under the learner's path. mlflow: they fetch it by its name
    from the MLflow server in learner.tracking_uri (docs/serving.md)."""
    vllm_args: tuple[str, ...] = ()
    """Further arguments for the vLLM server that spanloop starts, e.g. ["--tensor-parallel-size", "2"]."""
    host: str = "127.0.0.1"
    port: int = Field(8788, ge=0, le=65535)
    max_batch: int = Field(32, ge=1)
    max_wait_ms: float = Field(0.0, ge=0)
    """How long an idle batch waits for company; rows join between tokens anyway, so 0 is quickest."""
    exploration: float = Field(0.0, ge=0, le=0.5)
    """Floor for champion and canary: probability mass spread evenly over the open options; the mixture is what is logged as
    behaviour. The learning share has its own floor, see ``learner.exploration_start``."""
    max_adapters: int = Field(16, ge=2)
    threads: int = Field(1, ge=1)


class RewardTerm(_Section):
    """A declared reward ([[pipeline.rewards]], docs/rewards.md)."""

    name: str
    """Name and version of a registered reward, such as "rubric/1"."""
    weight: float = Field(0.0, ge=0)
    """In the team's composite; 0: reported, not paid."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the weight of a scaffold goes to 0 ..."""
    length: float = Field(50.0, gt=0)
    """... over so many versions of the value model (value_every, value_growth); with an indicator over so many orchestrations at
    its target."""
    indicator: str = ""
    """Channel of the team, such as "parl_finish", that the schedule goes by: it advances only while the channel is at its target and
    steady."""
    indicator_target: float = 0.0
    """Least mean of the channel ..."""
    indicator_tolerance: float = Field(0.05, gt=0)
    """... and largest difference of its fast and its slow mean."""
    gated: bool = True
    """Paid only where the outcome is at least outcome_floor."""
    options: dict[str, Any] = {}
    """What the reward itself takes."""

    @model_validator(mode="after")
    def _an_indicator_needs_a_schedule(self) -> RewardTerm:
        if self.indicator and self.schedule == "constant":
            raise ValueError(
                f"reward {self.name} has an indicator and no schedule that goes by it: set schedule = 'linear' or 'cosine'"
            )
        return self


class Pipeline(_Section):
    quiet_s: float = Field(1.0, ge=0)
    """An orchestration whose root has ended and that has no gaps is closed after this long without a new span."""
    timeout_s: float = Field(300.0, gt=0)
    """One with gaps is closed, provisionally, after this long."""
    retention_s: float = Field(86_400.0, gt=0)
    """How long a closed orchestration is kept in state to take late spans and feedback."""
    orchestrations_max: int = Field(100_000, ge=1)
    """So many closed orchestrations are kept in state at most; the oldest are then forgotten early."""
    batch_max: int = Field(500, ge=1)
    parallel_weight: float = Field(0.0, ge=0)
    """lambda of r_parallel (PARL); gated by the outcome."""
    finish_weight: float = Field(0.0, ge=0)
    """lambda of r_finish (PARL); gated by the outcome."""
    tool_weight: float = Field(0.0, ge=0)
    """Weight of the tool-validity reward R5; gated by the outcome."""
    tool_price: float = Field(0.0, ge=0)
    """What a tool call costs in R5, units of reward, whatever comes of it."""
    tool_duplicate_penalty: float = Field(0.0, ge=0)
    """What the same call with the same arguments again costs in R5, where the arguments are known."""
    rewards: tuple[RewardTerm, ...] = ()
    """Further rewards, each a table [[pipeline.rewards]]."""
    reward_functions: str = ""
    """Python file with reward functions of your own (docs/rewards.md). It is run by every process that computes rewards."""
    outcome_floor: float = 0.0
    """Structural rewards are paid only where the outcome is at least this."""
    holdout: float = Field(0.1, ge=0, lt=1)
    """Share of orchestrations kept for the gate."""
    credit: str = Field("ledger", pattern="^(ledger|team)$")
    credit_agents: str = Field("auto", pattern="^(auto|leave_one_out)$")
    """How agents that work side by side share what they brought (docs/credit.md). auto: Shapley values, with precedence where
    one spawned another, over roles first where roles group them (Owen); exact up to 8, sampled up to 100."""
    credit_turns: str = Field("value_difference", pattern="^(value_difference|gae)$")
    """What a turn of the orchestrator without token ids is worth: what it added, or turn-level GAE."""
    credit_lambda: float = Field(0.95, ge=0, le=1)
    """lambda of gae: 0 trusts the value model, 1 the outcome."""
    credit_trace: float = Field(0.0, ge=0, le=1)
    """What followed a token is added to its account, this much less for each decision between (docs/credit.md): 0 trusts the value
    model alone, 1 what happened. Values of menus (``learner.advantage`` all_action) have no part in it."""
    value_every: int = Field(64, ge=1)
    """Publish a value model after so many new outcomes."""
    value_growth: float = Field(0.2, ge=0, le=1)
    """... or, if that is more, after this share of all outcomes so far (1,536 at most), so that training costs less and less of
    a long stream. 0: always after value_every."""
    value_features: int = Field(2048, ge=16)
    """Distinct features that the value model tells apart; further ones share."""
    value_table: bool = False
    """V of a token state that repeats exactly is drawn to the mean outcome after it: C3 from logs (docs/credit.md)."""
    token_price: float = Field(0.0, ge=0)
    """What 1,000 tokens cost, units of reward: learned stopping weighs it against a better draft. A decision that tells ``cost`` among
    its state is taken at its word."""
    second_price: float = Field(0.0, ge=0)
    """What a second of an orchestration costs, units of reward; as token_price."""
    round_price: float = Field(0.0, ge=0)
    """What going on once costs, units of reward; as token_price."""
    value_units: tuple[str, ...] = ()
    """Words that name interchangeable things, such as skills: the value model then learns about all of them at once. In a
    prompt, a word unit-fact is a fact about a unit, fact-unit makes the unit the subject of a fact."""
    value_words: tuple[str, ...] = ()
    """Word of each token id, needed with value_units; empty: the embedded policy's vocabulary."""


class Learner(_Section):
    enabled: bool = True
    seed: int = 0
    batch_orchestrations: int = Field(128, ge=1)
    max_staleness: int = Field(4, ge=0)
    """eta: rows acted by a version older than this many updates are dropped and counted."""
    learning_rate: float = Field(1e-3, gt=0)
    epochs: int = Field(3, ge=1)
    minibatch_orchestrations: int = Field(32, ge=1)
    objective: Literal[
        "decoupled_ppo", "ppo", "bypass_ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "reinforce", "mis",
        "sequence_tis", "k3_rejection", "geometric_rejection",
    ] = "decoupled_ppo"  # fmt: skip
    """What pushes the log-probabilities (docs/objectives.md). Each brings its own of the following six."""
    clip: float = Field(0.0, ge=0)
    """Trust region below a ratio of 1, and above it where clip_high is 0; 0: the objective's own (0.2 for PPO)."""
    clip_high: float = Field(0.0, ge=0)
    """Trust region above a ratio of 1 (DAPO's clip-higher)."""
    dual_clip: float = Field(0.0, ge=0)
    """Bound of the loss at a negative advantage, above 1; 0: the objective's own."""
    ratio_cap: float = Field(0.0, ge=0)
    """Largest weight that corrects for the policy having moved on since it acted; 0: the objective's own (2)."""
    weighting: Literal[
        "", "decision", "rollout", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
    ] = ""  # fmt: skip
    """What counts alike: every decision (token-mean is the same), every orchestration (rollout), or every model call; empty: the
    objective's own."""
    horizon: int = Field(0, ge=0)
    """Tokens by which seq-mean-token-sum-norm divides; 0: the longest context."""
    entropy_start: float = Field(0.05, ge=0)
    entropy_end: float = Field(0.0, ge=0)
    entropy_updates: int = Field(40, ge=1)
    """Updates over which the entropy bonus goes from start to end. With all_action it is the temperature of the target,
    in units of reward."""
    advantage: str = Field("ledger", pattern="^(ledger|group|all_action)$")
    """ledger: the token's account; group: group-relative outcome; all_action: counterfactual values of the whole menu."""
    divergence: str = Field("reverse", pattern="^(forward|reverse)$")
    """all_action: direction of the divergence from the soft-greedy policy of the values (losses.py)."""
    normalise: str = Field("batch", pattern="^(batch|role)$")
    """Advantages are divided by their root mean square over the batch, or each role's by its own (Dr. MAS)."""
    train_roles: tuple[str, ...] = ()
    """Roles (docs/objectives.md) whose calls are trained; those of the others are frozen: they act and are not taught. Empty: all."""
    source_share_max: float = Field(1.0, gt=0, le=1)
    """Share of a batch that orchestrations of one harness may be; more of them are left out and counted (source_share)."""
    late_corrections: bool = True
    """Make up for what a later revision says of an orchestration that was taught, as long as it is not stale. Not with
    advantage = "group"."""
    group_size: int = Field(0, ge=0)
    """With advantage = "group": a batch waits until each of its groups has so many members; 0: it does not."""
    group_timeout_s: float = Field(60.0, ge=0)
    """... but no longer than this."""
    stall_s: float = Field(300.0, gt=0)
    """The log says why no batch was trained for so long."""
    deterministic: bool = True
    learning_share: float = Field(0.5, ge=0, le=0.9)
    """Traffic that the newest candidate may serve between promotions."""
    exploration_start: float = Field(0.3, ge=0, le=0.5)
    """Floor of the learning share at the first update: the mass that its calls spread evenly over the open options ..."""
    exploration_end: float = Field(0.06, ge=0, le=0.5)
    """... and at the last of ``exploration_updates``, in equal steps."""
    exploration_updates: int = Field(48, ge=1)
    gate: bool = True
    """False only for experiments: every candidate is promoted at once."""
    gate_every: int = Field(4, ge=1)
    """Updates between two evaluations of the newest candidate."""
    gate_confidence: float = Field(0.9, gt=0.5, lt=1)
    gate_margin: float = Field(0.0, ge=0)
    """The lower bound may be this far below zero."""
    gate_min_ess: float = Field(0.1, ge=0, le=1)
    sentinels: bool = True
    """Freeze learning and promotion when what agents do changes in a way that the outcome does not pay for (docs/sentinels.md)."""
    sentinel_window: int = Field(400, ge=20)
    """Orchestrations that are compared with as many at the beginning."""
    sentinel_confidence: float = Field(0.9999, gt=0.5, lt=1)
    """Of each look at each signal."""
    audit_s: float = Field(60.0, ge=0)
    """Seconds between two audits of what serves: log-probabilities of the served versions against their weights; 0: none."""
    canary_share: float = Field(0.25, gt=0, le=0.5)
    canary_confidence: float = Field(0.95, gt=0.5, lt=1)
    canary_min: int = Field(50, ge=2)
    """Orchestrations of each arm before the first look."""
    canary_max: int = Field(600, ge=10)
    """Then the canary ends as inconclusive."""
    canary_max_s: float = Field(600.0, gt=0)
    tracking_uri: str = ""
    """MLflow; empty: MLFLOW_TRACKING_URI, else sqlite in the workspace."""
    threads: int = Field(1, ge=1)
    width: int = Field(64, ge=8)
    layers: int = Field(1, ge=1)
    heads: int = Field(4, ge=1)
    context: int = Field(64, ge=16)
    vocabulary: tuple[str, ...] = ()
    """Words of the embedded policy's tokenizer; needed to serve and train it."""
    model: str = ""
    """Folder of a Hugging Face causal LM to train with LoRA, written just as the vLLM server at ``gateway.upstream`` got it;
    empty: the embedded policy (width, layers, heads, context, vocabulary)."""
    decisions: bool = False
    """Train and serve a decision policy instead of a policy of text: your agents ask the gateway's /v1/decide which option to take
    (docs/decide.md). For agents whose LLM is closed. Of the embedded policy's sizes only width is used."""
    decision_buckets: int = Field(4096, ge=64)
    """Rows of the decision policy's embeddings: features are hashed, so more rows mean fewer that share one."""
    lora_rank: int = Field(8, ge=1, le=512)
    """At most vLLM's --max-lora-rank."""
    lora_alpha: int = Field(16, ge=1)
    """The adapter's change is scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ()
    """Names of the linear layers that get an adapter, such as q_proj; empty: all but the output head."""
    dtype: str = Field("float32", pattern="^(float32|bfloat16)$")
    """Type of the base model's weights in the learner; the adapter is float32."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """Where the model is trained. A replay gives the same bits on the cpu only."""
    ranks: int = Field(1, ge=1, le=64)
    """Processes that train the model together, one a GPU with device = "cuda": torchrun starts them for each batch, and the base
    model is sharded over them (FSDP2). The learner itself then keeps the base on the CPU, for the gate and probes."""
    max_length: int = Field(1024, ge=16)
    """Longest prompt + response of the model in tokens; rows of longer ones are dropped and counted."""
    microbatch_tokens: int = Field(8192, ge=16)
    """Tokens that go through the model at once, padding counted; less needs less memory."""
    packing: bool = True
    """Compute what rows of the model share at their beginning once (the turns of a conversation repeat it)."""
    probe_tolerance: float = Field(0.0, ge=0)
    """Mean difference (nats) between the learner's and serving's log-probabilities of a probe at which a version is
    refused, ten times that at one token. 0: by dtype, 0.001 for float32 and 0.06 for bfloat16; set it where the two differ in
    type."""

    @property
    def has_policy(self) -> bool:
        """Whether there is something to train and serve."""
        return bool(self.vocabulary or self.model or self.decisions)


class Kafka(_Section):
    """Used where ``bootstrap_servers`` is set."""

    prefix: str = Field("spanloop.", pattern=r"^[A-Za-z0-9._-]{0,100}$")
    """Topics are named prefix + topic, e.g. spanloop.spans."""
    partitions: int = Field(4, ge=1, le=1000)
    """Partitions of the topics that scale out; ``policies``, ``models``, ``samples`` and ``dead_letters`` have one. Changing
    it later needs a rebuild: see docs/kafka.md."""
    replication: int = Field(1, ge=1, le=7)
    """Replication factor of topics that spanloop creates: 3 in production."""
    retention_hours: float = Field(168.0, gt=0)
    """Retention of topics that spanloop creates; the archive keeps what Kafka forgets."""
    otlp_topics: tuple[str, ...] = ()
    """Topics of the OpenTelemetry Collector's Kafka exporter to ingest (`spanloop ingest`), without the prefix."""
    client: dict[str, str] = {}
    """Further librdkafka properties, such as security.protocol and sasl.*."""


class Process(_Section):
    """The Faust workers of ``spanloop process``."""

    group: str = "spanloop"
    """Consumer group (Faust app id): workers with one group share the partitions."""
    workers: int = Field(1, ge=1, le=256)
    """How many `spanloop up` starts; more than kafka.partitions have nothing to do."""
    engine: str = Field("faust", pattern="^(faust|loop)$")
    """Who consumes: Faust, or a plain confluent-kafka loop with the same stages (docs/adr/0008)."""
    snapshots: str = ""
    """Folder or s3://bucket/prefix of the state's snapshots; empty: WORKSPACE/snapshots. Workers on several hosts need one
    that all of them reach."""
    snapshot_every_s: float = Field(5.0, gt=0)
    batch_max: int = Field(200, ge=1)
    """Records that a worker folds at once."""
    session_timeout_s: float = Field(6.0, ge=1)
    """A worker that is silent for so long has lost its partitions."""
    metrics_host: str = "127.0.0.1"
    metrics_port: int = Field(0, ge=0, le=65535)
    """Prometheus metrics on http://metrics_host:metrics_port/metrics; 0: none. Worker n of several: metrics_port + n - 1."""
    stall_s: float = Field(30.0, gt=0)
    """The watchdog names a stage that has had records waiting and made no progress for so long."""


class Archive(_Section):
    """Parquet files of all topics."""

    url: str = ""
    """Folder or s3://bucket/prefix; empty: WORKSPACE/archive."""
    endpoint: str = ""
    """Endpoint of an S3-compatible store, with scheme; empty: AWS."""
    every_s: float = Field(10.0, gt=0)
    """The archiver writes what has arrived after so long ..."""
    records: int = Field(20_000, ge=1)
    """... or at so many records of a partition."""
    compact_below_mb: float = Field(16.0, ge=0)
    """Smaller files of a finished day and tenant are merged."""


class JudgeTerm(_Section):
    """A judge of what agents say ([[judges]], docs/rewards.md), run by `spanloop judge`."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,63}/[0-9]+$")
    """Name and version, such as "clarity/1": another model, or other words, is another version."""
    url: str = Field(pattern=r"^https?://[^\s@]+$")
    """Base URL of an OpenAI-compatible server, up to and with /v1."""
    model: str = Field(min_length=1)
    key: SecretStr = SecretStr("")
    """Its key; empty: none is sent."""
    rubric: str = Field(min_length=1)
    """What the judge is asked, in your words."""
    channel: str = Field(min_length=1)
    """Name of the feedback that its verdicts become: what an item of rubric/1, or the channel of another reward, is called."""
    role: str = ""
    """Agents of this role are judged; empty: all that said something."""
    shows: Literal["agent", "all"] = "agent"
    """What it reads: what the agent said and was told by others, or what everybody said."""
    share: float = Field(1.0, gt=0, le=1)
    """Share of orchestrations, drawn by their id."""
    calls_per_day: int = Field(1_000, ge=1)
    """Calls in 24 hours at most; the rest waits."""
    timeout_s: float = Field(30.0, gt=0)
    parallel: int = Field(4, ge=1, le=64)
    """Calls at once."""

    @field_validator("channel")
    @classmethod
    def _not_the_outcome(cls, value: str) -> str:
        if value == "outcome":
            raise ValueError(
                "outcome is the team's reward, which no judge decides: name it otherwise and weigh it"
            )
        return value


_UPSTREAM = re.compile(r"https?://[^\s/?#]+[^\s]*")
_BROKER = re.compile(r"(?:[A-Za-z0-9_]+://)?(?:\[[0-9A-Fa-f:.%]+\]|[^\s/:@\[\]]+):([0-9]{1,5})")


class Settings(BaseSettings):
    """All settings of one deployment."""

    model_config = SettingsConfigDict(
        env_prefix="SPANLOOP_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )

    workspace: Path = Path(".spanloop")
    """Folder of log, state, artifacts, MLflow data and archive."""
    tenant: str = Field("default", pattern=TENANT)
    bootstrap_servers: str = ""
    """Kafka brokers, host:port,...; empty: the embedded log, one SQLite file in the workspace."""
    kafka: Kafka = Kafka()  # type: ignore[call-arg]
    process: Process = Process()  # type: ignore[call-arg]
    archive: Archive = Archive()  # type: ignore[call-arg]
    collector: Collector = Collector()  # type: ignore[call-arg]
    content: Content = Content()
    gateway: Gateway = Gateway()  # type: ignore[call-arg]
    serving: Serving = Serving()  # type: ignore[call-arg]
    pipeline: Pipeline = Pipeline()  # type: ignore[call-arg]
    learner: Learner = Learner()  # type: ignore[call-arg]
    credentials: tuple[Credential, ...] = ()
    judges: tuple[JudgeTerm, ...] = ()
    """Judges of what agents say, each a table [[judges]] (docs/rewards.md)."""

    @field_validator("judges")
    @classmethod
    def _named_once(cls, value: tuple[JudgeTerm, ...]) -> tuple[JudgeTerm, ...]:
        if len({judge.name for judge in value}) < len(value):
            raise ValueError("two judges have one name: another model or other words is another version")
        return value

    @field_validator("bootstrap_servers")
    @classmethod
    def _brokers(cls, value: str) -> str:
        for broker in value.split(",") if value.strip() else ():
            found = _BROKER.fullmatch(broker.strip())
            if found is None or not 0 < int(found[1]) <= 65535:
                raise ValueError(
                    f"{broker.strip()[:100]!r} is no broker: write host:port, several with commas between"
                )
        return value

    @model_validator(mode="after")
    def _one_kind_of_policy(self) -> Settings:
        if self.learner.decisions and (self.learner.model or self.learner.vocabulary):
            raise ValueError(
                "learner.decisions trains a decision policy, learner.model and learner.vocabulary one of text: a workspace has one "
                "policy, so leave the others out"
            )
        if self.learner.decisions and self.serving.engine != "embedded":
            raise ValueError("a decision policy (learner.decisions) is served by serving.engine = 'embedded'")
        return self

    @model_validator(mode="after")
    def _units_need_words(self) -> Settings:
        if self.pipeline.value_units and not self.pipeline.value_words:
            if not self.learner.vocabulary:
                raise ValueError(
                    "pipeline.value_units needs the words of the token ids: set pipeline.value_words or learner.vocabulary"
                )
            words = (*SPECIAL_WORDS, *self.learner.vocabulary)
            object.__setattr__(self, "pipeline", self.pipeline.model_copy(update={"value_words": words}))
        return self

    @model_validator(mode="after")
    def _public_needs_credentials(self) -> Settings:
        for name, host in (
            ("collector", self.collector.host),
            ("gateway", self.gateway.host),
            ("serving", self.serving.host),
        ):
            if not _is_loopback(host) and (name == "serving" or not self.credentials):
                hint = "serving has no authentication" if name == "serving" else "no [[credentials]] are set"
                raise ValueError(
                    f"{name}.host = {host!r} is reachable from outside and {hint}: use 127.0.0.1 or add them"
                )
        return self

    @property
    def database(self) -> Path:
        """The embedded log and state: one SQLite file."""
        return self.workspace / "spanloop.db"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (env_settings, init_settings)


def _is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``; a name other than localhost may mean anything."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def load_settings(path: Path | None = None, flags: dict[str, Any] | None = None) -> Settings:
    """Settings from a TOML file, the environment and flags (nested dicts; they win over both).

    Raises:
        ConfigError: the file is missing or not TOML, a key is unknown, a value is out of range.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text())
        except FileNotFoundError as exc:
            raise ConfigError(
                f"no settings file {path}; `spanloop config example` prints one to start from"
            ) from exc
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(f"{path} is not valid TOML: {exc}") from exc
        except OSError as exc:
            raise ConfigError(f"cannot read the settings file {path}: {exc.strerror or exc}") from exc
    try:
        settings = Settings(**data)
        if flags:
            values = _merge(settings.model_dump(), flags)
            settings = _Plain(**values)
    except ValidationError as exc:
        lines = [
            f"  {'.'.join(str(p) for p in e['loc']) or 'settings'}: {e['msg']}"
            for e in exc.errors(include_input=False)
        ]
        where = f" in {path}" if path else ""
        raise ConfigError(
            "settings are wrong" + where + " (or SPANLOOP_ variables):\n" + "\n".join(lines)
        ) from exc
    except SettingsError as exc:
        raise ConfigError(
            f"a SPANLOOP_ variable is wrong: {exc}; a whole section or a list is given as JSON, one setting as "
            "SPANLOOP_SECTION__NAME=value"
        ) from exc
    return settings


class _Plain(Settings):
    @classmethod
    def settings_customise_sources(cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource,
                                   *rest: PydanticBaseSettingsSource, **more: Any) -> tuple[PydanticBaseSettingsSource, ...]:  # fmt: skip
        return (init_settings,)


def origins(path: Path | None = None) -> dict[str, str]:
    """For each dotted setting where its value comes from: default, file or environment."""
    data = tomllib.loads(path.read_text()) if path else {}
    found: dict[str, str] = {}

    def walk(model: type[BaseModel], prefix: str, values: dict[str, Any]) -> None:
        for name, field in model.model_fields.items():
            dotted = f"{prefix}{name}"
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                walk(inner, dotted + ".", values.get(name, {}))
                continue
            env = "SPANLOOP_" + dotted.upper().replace(".", "__")
            found[dotted] = (
                f"environment {env}" if env in os.environ else "file" if name in values else "default"
            )

    walk(Settings, "", data)
    return found
