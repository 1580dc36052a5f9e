//! Defines the agent's REST API: its types, its OpenAPI description and a client.
//!
//! [`Operation`] lists the operations of an agent. The agent's router, the OpenAPI document and the
//! [`Client`] are derived from it, so they have the same routes. A figure that was not measured is
//! null, never 0. Names end with the unit.

pub mod client;
mod convergence;
pub mod device_stream;
pub mod discovered;
pub mod disks;
mod doubt;
pub mod encoding;
pub mod error;
pub mod event;
pub mod guest;
pub mod host;
pub mod migration;
pub mod openapi;
pub mod operation;
pub mod plan;
pub mod properties;
pub mod realm;
pub mod replica;
pub mod report;
mod risk;
pub mod tracked_writes;

pub use client::{Client, ClientError, Events, Watch};
pub use convergence::{Convergence, Outpaced, StopChoice, StopReason, StopRule, TooFast};
pub use device_stream::{DEVICE_PROTOCOL, DeviceReader, DeviceStream, DeviceWriter};
pub use discovered::{
    DiscoveredGuest, DiscoveredGuests, GuestOwner, Obstacle, QmpSocket, QmpSocketState,
};
pub use disks::{BaseChoice, DiskChoice};
pub use doubt::{BECAUSE_CHARS_MAX, Doubt, HandoverRecord, OtherSide, Resolve, WayOut};
pub use encoding::{CompressionChoice, DeltaCache, Encoding};
pub use error::{ApiError, ErrorCode};
pub use event::{Event, ReservedBy, What};
pub use guest::{AttachGuest, Guest, GuestState, Guests, ReclaimGuest, StartGuest, StopGuest};
pub use host::{
    Host, NotWritable, Probe, ProbeResult, Qemu, Scope, Trust, TrustedHost, TrustedHosts,
};
pub use migration::{
    Asked, Limit, LinkProgress, Migration, Migrations, Outcome, PathUse, Phase, Progress,
    RegionProgress, Side, StartMigration, Strategy,
};
pub use openapi::{openapi, openapi_text};
pub use operation::{Method, Operation};
pub use plan::{Check, Judgement, Plan, PlanRequest, PredictedRange, Prediction, Verdict};
pub use properties::{
    Compared, Continuity, GuestRate, GuestRates, LostWork, Predictability, Properties, Resources,
    Robustness, Stalls, Transparency,
};
pub use realm::{
    HostPath, JoinRealm, PathKind, Realm, RealmGateway, RealmMember, RealmNetwork, RealmServer,
    RealmStanding, RealmStatus,
};
pub use replica::{
    FailOver, FailedOver, Replica, ReplicaVersion, Replicas, ReplicateGuest, Replication,
    ReplicationState, Replications, Retention,
};
pub use report::{
    BytesByKind, ClockTeller, Cost, DiskReport, DowntimeParts, FaultReport, GuestClock, HookRun,
    HostCost, Judgements, KeptMemoryReport, MemoryFileReport, PhaseTime, Report, VerifyResult,
};
pub use risk::{Consequence, Follows, PhaseRisks, Risk, Stakes};
pub use tracked_writes::{TrackedDisk, TrackedWrites, Tracking};

/// Maximum size of a request's body that an agent reads, in bytes.
pub const REQUEST_BYTES_MAX: usize = 256 << 10;
/// Maximum size of an answer's body that a client reads, in bytes.
pub const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Maximum length of a line of a watched migration that a client reads, in bytes.
pub const WATCH_LINE_BYTES_MAX: usize = 64 << 10;
/// Maximum length of an event that a client reads, in bytes.
pub const EVENT_LINE_BYTES_MAX: usize = 128 << 10;
/// Interval at which an agent repeats the unchanged progress of a watched migration, and that a
/// stream of events is current, in milliseconds.
pub const WATCH_REPEAT_MS: u64 = 1000;
/// Default socket of an agent.
pub const SOCKET_DEFAULT: &str = "/run/longhaul/agent.sock";
