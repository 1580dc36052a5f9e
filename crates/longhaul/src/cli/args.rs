//! The command line: every command, its arguments, and their help texts.

mod parcel;
mod realm;
mod replica;

pub(crate) use parcel::{
    Changes, ComparedArgs, CreateArgs, ExportArgs, ParcelArgs, ParcelCommand, ParcelGuest,
    ParcelImportArgs, ShipArgs,
};
pub(crate) use realm::{
    FolderArgs, InviteArgs, NetworkArgs, NetworkCommand, RealmArgs, RealmCommand, RemoveHostArgs,
    RendezvousArgs, RendezvousCommand, ServeArgs,
};

pub(crate) use replica::{FailoverArgs, ReplicasArgs, ReplicasCommand, ReplicateArgs};

use crate::cli::whole_ms;
use clap::{Args, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use longhaul_api::{
    BaseChoice, CompressionChoice, Convergence, DeltaCache, DiskChoice, Scope, StopRule, Strategy,
    TooFast,
};
use longhaul_image::ImageName;
use longhaul_image::store::Place;
use longhaul_protocol::units::{parse_bit_rate, parse_duration};
use std::path::PathBuf;
use std::time::Duration;

/// Moves running virtual machines between hosts.
#[derive(Debug, Parser)]
#[command(name = "longhaul", version, max_term_width = 100)]
#[command(
    after_help = "Exit codes: 0 done · 1 failed, the guest runs where it was · 2 wrong usage \
    · 3 refused, nothing was changed · 4 in doubt · 5 no agent · 130 stopped by you"
)]
pub(crate) struct Cli {
    /// Print JSON instead of text
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) connection: Connection,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Which agent to talk to. Each can be set by the environment; `connect` says in what order.
#[derive(Debug, Args)]
#[command(next_help_heading = "Which agent")]
pub(crate) struct Connection {
    /// The agent's unix socket [env: LONGHAUL_SOCKET] [default: /run/longhaul/agent.sock]
    #[arg(long, global = true, value_name = "PATH", conflicts_with = "api")]
    pub(crate) socket: Option<PathBuf>,
    /// An agent on another machine, over TLS [env: LONGHAUL_API]
    #[arg(long, global = true, value_name = "HOST:PORT")]
    pub(crate) api: Option<String>,
    /// With --api: that agent's certificate [env: LONGHAUL_API_CERTIFICATE]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) api_certificate: Option<PathBuf>,
    /// With --api: the file that holds its token [env: LONGHAUL_API_TOKEN_FILE]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) api_token_file: Option<PathBuf>,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run this host's agent
    Agent(AgentArgs),
    /// Show this host; trust, list, forget and probe others; join a realm, invite hosts to one
    Host(HostArgs),
    /// List the hosts that this one knows, and how each is reached: directly or relayed, and why
    Hosts,
    /// List, start, stop, attach, detach, resume and reclaim guests; track their writes
    Guests(GuestsArgs),
    /// Check and predict a move without changing anything
    Plan(PlanArgs),
    /// Move a running guest, or a group of them, to another host
    Migrate(MigrateArgs),
    /// Cancel a move; the guest stays where it is
    Cancel(IdArgs),
    /// Decide which host runs a guest when the other host is gone for good
    Resolve(ResolveArgs),
    /// Change how fast a move may send
    Limit(LimitArgs),
    /// Show what a move was predicted to cost, and what it did
    Report(ReportArgs),
    /// Keep a replica of a guest's disks on another host, and bring it up to date again and again;
    /// list the replications
    Replicate(ReplicateArgs),
    /// List, restore, verify and remove the replicas that this host keeps
    Replicas(ReplicasArgs),
    /// Let a guest run here from its replica, because its host is gone
    Failover(FailoverArgs),
    /// List the moves from and to this host
    Migrations,
    /// Follow the moves from and to this host, and its reserved guests, until Ctrl-C
    Events,
    /// Import, list, verify, fetch and remove base images; needs no agent
    Image(ImageArgs),
    /// Make, export, ship, import and compare parcels: devices that carry guests' disks by courier;
    /// needs no agent
    Parcel(ParcelArgs),
    /// Read the journals of the moves from and to this host; needs no agent
    Journal {
        #[command(subcommand)]
        command: JournalCommand,
    },
    /// Check whether this host can move guests; test moves on this machine
    Doctor(DoctorArgs),
    /// Make and sign a realm: which hosts belong together, networks, servers; needs no agent
    Realm(RealmArgs),
    /// List, create and change the networks of a realm; needs no agent
    Network(NetworkArgs),
    /// Run a rendezvous server: introduces hosts of realms, and relays between them
    Rendezvous(RendezvousArgs),
    /// A process of a disk export; agents start it
    #[command(hide = true)]
    DiskFront(DiskFrontArgs),
    /// The process that freezes a guest's file systems, and thaws them
    #[command(hide = true)]
    FreezeGuard {
        /// The port of the guest's agent
        port: PathBuf,
        /// A file that exists while they are frozen
        note: PathBuf,
    },
    /// The process that holds QEMU's socket while a guest's memory follows; agents start it
    #[command(hide = true)]
    PageServer {
        /// Its socket
        socket: PathBuf,
    },
    /// Print a shell's completion script
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AgentArgs {
    /// The configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// List the points at which LONGHAUL_FAIL_POINT can make it fail, and exit
    #[arg(long, hide = true)]
    pub(crate) list_fail_points: bool,
}

#[derive(Debug, Args)]
pub(crate) struct DiskFrontArgs {
    /// Which process to be
    #[arg(value_enum)]
    pub(crate) part: FrontPart,
    /// The folder of the disk export
    pub(crate) folder: PathBuf,
}

/// The processes of a disk export.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum FrontPart {
    /// Keeps a server answering.
    Supervise,
    /// Answers, and tells the agent of every write.
    Tell,
    /// Answers, and records which parts of the disk the guest writes.
    Track,
    /// Answers for a disk that is not all here yet.
    Arrive,
    /// Answers.
    PassThrough,
    /// Answers for a base image, and brings it.
    Base,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// The configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Move a test guest back and forth between two agents on this machine, and compare
    #[arg(long)]
    pub(crate) self_test: bool,
    /// The number of moves
    #[arg(
        long,
        default_value_t = 20,
        requires = "self_test",
        value_parser = clap::value_parser!(u32).range(1..=10_000)
    )]
    pub(crate) moves: u32,
}

#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    #[command(subcommand)]
    pub(crate) command: Option<HostCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum HostCommand {
    /// Show this host and its fingerprint
    Show,
    /// List the hosts that this one trusts
    List,
    /// Trust another host
    Trust(TrustArgs),
    /// Stop trusting a host
    Forget {
        /// Its name here
        name: String,
    },
    /// Measure the link to a trusted host
    Probe(ProbeArgs),
    /// Join a realm with the token that its operator gave; nothing else is typed
    Join {
        /// The token: begins with `lhjoin1`
        token: String,
    },
    /// Show this host's realm: members, networks, rendezvous servers
    Realm,
    /// Forget this host's realm
    Leave,
    /// As operator of a realm: print a token with which one new host joins; needs no agent
    Invite(InviteArgs),
    /// As operator of a realm: remove a host from it; needs no agent
    Remove(RemoveHostArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TrustArgs {
    /// The name that it gets here
    pub(crate) name: String,
    /// Its fingerprint, as `longhaul host` shows it there
    pub(crate) fingerprint: String,
    /// Where its agent listens, HOST:PORT; all are tried at once, the first is preferred
    #[arg(required = true, value_name = "ADDRESS")]
    pub(crate) addresses: Vec<String>,
    /// What it may ask of this host
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "WHAT",
        default_value = "query"
    )]
    pub(crate) may: Vec<May>,
    /// Replace the host that has this name
    #[arg(long)]
    pub(crate) replace: bool,
}

/// What a trusted host may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum May {
    /// Nothing: only this host asks the other
    Nothing,
    /// What this host is, has, and could take
    Query,
    /// To send guests here
    Send,
}

impl May {
    /// The scope that it stands for.
    pub(crate) fn scope(self) -> Option<Scope> {
        match self {
            Self::Nothing => None,
            Self::Query => Some(Scope::Query),
            Self::Send => Some(Scope::Send),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ProbeArgs {
    /// Its name here
    pub(crate) name: String,
    /// How long to send
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=60))]
    pub(crate) seconds: u32,
    /// Send no faster than this, for example 80mbit
    #[arg(long, value_name = "RATE", value_parser = parse_bit_rate)]
    pub(crate) bandwidth: Option<u64>,
}

#[derive(Debug, Args)]
pub(crate) struct GuestsArgs {
    #[command(subcommand)]
    pub(crate) command: Option<GuestsCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum GuestsCommand {
    /// List the guests of this host
    List,
    /// Start a guest
    Start {
        /// A description (FILE.toml), or the name of a guest that has been described here before
        #[arg(value_name = "FILE|NAME")]
        guest: String,
    },
    /// Attach to a guest that something else started, changing nothing
    Attach {
        /// What to call it here
        name: String,
        /// Its QEMU's control socket
        #[arg(long, value_name = "SOCKET")]
        qmp: PathBuf,
        /// Its process ID, if the socket does not tell it
        #[arg(long)]
        pid: Option<u32>,
    },
    /// List the QEMUs of this host, and what would keep Longhaul from attaching to them
    Discover,
    /// Forget an attached guest; it keeps running
    Detach {
        /// The guest
        name: String,
    },
    /// Track which parts of its local disks a guest writes, until its QEMU ends
    TrackWrites {
        /// The guest
        name: String,
        /// Show how much may have changed since tracking began
        #[arg(long, conflicts_with = "stop")]
        show: bool,
        /// Stop tracking, and forget what was written
        #[arg(long)]
        stop: bool,
    },
    /// Resume a guest that a move left paused, and that belongs to this host
    Resume {
        /// The guest
        name: String,
    },
    /// Take back a guest that moved to a host that is gone for good; it is not started
    Reclaim(ReclaimArgs),
    /// Ask a guest to shut down, and wait for it
    Stop {
        /// The guest
        name: String,
        /// End its QEMU at once, as if the power failed
        #[arg(long)]
        force: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PlanArgs {
    /// The guest
    pub(crate) guest: String,
    /// The host to move it to
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) wishes: Wishes,
}

#[derive(Debug, Args)]
pub(crate) struct Wishes {
    /// The downtime to aim for
    #[arg(long, default_value = "300ms", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) downtime: Duration,
    /// Send no faster than this, for example 80mbit
    #[arg(long, value_name = "RATE", value_parser = parse_bit_rate)]
    pub(crate) bandwidth: Option<u64>,
    /// When its memory is sent: before the switchover (`precopy`); once before it, and what was
    /// written since then while it runs at the destination (`hybrid`); all of it then (`postcopy`);
    /// or before it, unless the guest writes too fast for the downtime (`auto`)
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) strategy: Strategy,
    /// Release the guest as soon as it is stopped: a round trip less downtime, but in doubt for
    /// longer if the link breaks
    #[arg(long)]
    pub(crate) early_release: bool,
    /// Refuse unless the realm's arbiter can end a doubt about where the guest runs
    #[arg(long)]
    pub(crate) require_arbiter: bool,
    /// Copy memory that follows to a file of this host, so that the death of the guest's QEMU here,
    /// or a restart of this host, is a pause; not with `--strategy precopy`
    #[arg(long)]
    pub(crate) keep_memory: bool,
    #[command(flatten)]
    pub(crate) ending: Ending,
}

/// How the move comes to its end.
#[derive(Debug, Args)]
#[command(next_help_heading = "If the guest writes too fast for the downtime")]
pub(crate) struct Ending {
    /// What to do then
    #[arg(long, default_value = "accept", value_name = "WHAT")]
    pub(crate) too_fast: WhenTooFast,
    /// With `--too-fast slow`: take at most this percentage of its time
    #[arg(
        long,
        default_value_t = 60,
        value_name = "PERCENT",
        value_parser = clap::value_parser!(u8).range(1..=99)
    )]
    pub(crate) slow_at_most: u8,
    /// With `--too-fast slow` or `wait`: after this time, accept a longer downtime
    #[arg(long, default_value = "5min", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) wait_at_most: Duration,
    /// The rule that decides when to stop the guest; all but the first are for comparison
    #[arg(long, default_value = "predicted", value_name = "RULE")]
    pub(crate) stop_rule: Rule,
}

impl Ending {
    /// As the agent is asked for it.
    pub(crate) fn convergence(&self) -> Convergence {
        Convergence {
            stop_rule: match self.stop_rule {
                Rule::Predicted => StopRule::Predicted,
                Rule::Cloudnet => StopRule::Cloudnet,
                Rule::Xen => StopRule::Xen,
                Rule::Qemu => StopRule::Qemu,
            },
            too_fast: match self.too_fast {
                WhenTooFast::Accept => TooFast::Accept,
                WhenTooFast::Slow => TooFast::Slow,
                WhenTooFast::Wait => TooFast::Wait,
            },
            slow_at_most_percent: self.slow_at_most,
            wait_at_most_ms: whole_ms(self.wait_at_most),
        }
    }
}

/// What is done about a guest that writes too fast.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WhenTooFast {
    /// Stop it at the best moment, for longer than asked
    Accept,
    /// Slow it, step by step
    Slow,
    /// Wait for a quieter moment
    Wait,
}

/// When a guest is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rule {
    /// The predicted downtime fits
    Predicted,
    /// CloudNet's: less remains than after each of the last 5 passes
    Cloudnet,
    /// Xen's: 50 pages remain, 30 passes, or 3 times the memory sent
    Xen,
    /// QEMU's: the remaining pages, uncompressed, fit the downtime
    Qemu,
}

#[derive(Debug, Args)]
pub(crate) struct MigrateArgs {
    /// The guest; several with --group
    #[arg(value_name = "GUEST", required = true)]
    pub(crate) guests: Vec<String>,
    /// The host to move it to
    #[arg(long, value_name = "HOST")]
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) wishes: Wishes,
    /// Hash all memory and disks on both sides before the guest is handed over, and compare; memory
    /// that follows the guest (`hybrid`, `postcopy`) is not compared
    #[arg(long)]
    pub(crate) verify: bool,
    /// How long to wait for the link when it breaks
    #[arg(long, default_value = "60s", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) patience: Duration,
    /// How local disks move: `precopy`, `mirror`, `hybrid`, `postcopy`, the best of these (`auto`),
    /// or not at all (`shared`)
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) disks: DiskChoice,
    /// If the destination lacks part of a base image: fetch it before the guest runs there
    /// (`whole`), or while it runs there (`lazy`), which needs the repository until it is complete
    #[arg(long, value_name = "HOW", default_value_t)]
    pub(crate) base: BaseChoice,
    /// Move several guests: they share --bandwidth, and there is one report
    #[arg(long)]
    pub(crate) group: bool,
    /// With --group: how many move at the same time
    #[arg(
        long,
        value_name = "COUNT",
        default_value_t = 4,
        requires = "group",
        value_parser = clap::value_parser!(u8).range(1..=32)
    )]
    pub(crate) at_once: u8,
    #[command(flatten)]
    pub(crate) encoding: EncodingArgs,
}

/// How memory is encoded. The defaults are the agent's configuration, where the default is `auto`.
#[derive(Debug, Args)]
pub(crate) struct EncodingArgs {
    /// Compress with `raw`, `lz4-fast`, `lz4`, `zstd:LEVEL`, `zstd-long:LEVEL`, or whichever moves
    /// most (`auto`)
    #[arg(long, value_name = "HOW")]
    pub(crate) compression: Option<CompressionChoice>,
    /// Memory for the cache of sent pages, from which only changes are sent: `auto`, `off`, or a
    /// size such as 64MiB
    #[arg(long, value_name = "SIZE")]
    pub(crate) delta_cache: Option<DeltaCache>,
    /// Send pages and blocks even if the destination has the same content elsewhere: in the guest's
    /// memory, on a disk that moves with it, or in another guest that moves there at the same time
    #[arg(long)]
    pub(crate) no_references: bool,
    /// Like --no-references, but only for disks: pages whose content is on a disk, and blocks of
    /// disks
    #[arg(long)]
    pub(crate) no_disk_references: bool,
}

#[derive(Debug, Args)]
pub(crate) struct IdArgs {
    /// The migration's id, the beginning of its id, or the guest that is moving
    #[arg(value_name = "ID|GUEST")]
    pub(crate) migration: String,
}

#[derive(Debug, Args)]
pub(crate) struct ResolveArgs {
    /// The migration's id, the beginning of its id, or its guest
    #[arg(value_name = "ID|GUEST")]
    pub(crate) migration: String,
    /// The host that the guest will belong to
    #[arg(long, value_name = "SIDE")]
    pub(crate) run_on: RunOn,
    /// Why the other host cannot run it; required if this host is to run it
    #[arg(long, value_name = "STATE")]
    pub(crate) other_side: Option<OtherSide>,
    /// At a destination that runs the guest already: give up the blocks of its disks that are still
    /// at the source; they read as zeros from then on
    #[arg(long)]
    pub(crate) give_up_missing: bool,
    /// The reason, for the log and the journal
    #[arg(long, value_name = "TEXT")]
    pub(crate) because: Option<String>,
    /// Do not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReclaimArgs {
    /// The guest
    pub(crate) name: String,
    /// Why the host that it moved to cannot run it
    #[arg(long, value_name = "STATE")]
    pub(crate) other_side: OtherSide,
    /// The reason, for the log
    #[arg(long, value_name = "TEXT")]
    pub(crate) because: String,
    /// Do not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}

/// A side of a move.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RunOn {
    /// The host that the guest was leaving
    Source,
    /// The host that it was moving to
    Destination,
}

/// Why a host cannot run a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OtherSide {
    /// It is off for good
    Dead,
    /// It is cut off from the guest's disks and networks
    Fenced,
}

#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// The migration's id, the beginning of its id, or the guest that is moving
    #[arg(value_name = "ID|GUEST")]
    pub(crate) migration: String,
    /// Send no faster than this, for example 80mbit; `none` for no limit
    #[arg(value_parser = parse_limit)]
    pub(crate) rate: RateLimit,
}

/// A limit, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RateLimit(pub(crate) Option<u64>);

fn parse_limit(text: &str) -> Result<RateLimit, String> {
    if text == "none" {
        return Ok(RateLimit(None));
    }
    parse_bit_rate(text)
        .map(|rate| RateLimit(Some(rate)))
        .map_err(|error| error.to_string())
}

#[derive(Debug, Args)]
pub(crate) struct ReportArgs {
    /// The migration's id or the beginning of it [default: the latest migration]
    #[arg(value_name = "ID")]
    pub(crate) migration: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Show who may run a guest, record by record
    Show(ShowJournalArgs),
    /// Set a damaged journal aside, which frees its guest; the agent must be stopped (guests keep
    /// running)
    #[command(name = "set-aside")]
    SetAside(SetAsideArgs),
}

#[derive(Debug, Args)]
pub(crate) struct SetAsideArgs {
    /// The migration's id or the beginning of it
    #[arg(value_name = "ID")]
    pub(crate) migration: String,
    /// The host that may run the guest, according to both journals
    #[arg(long, value_enum)]
    pub(crate) belongs: Option<Belongs>,
    /// The other host's name here, if neither the journal nor the right names it
    #[arg(long, value_name = "NAME", requires = "belongs")]
    pub(crate) other_host: Option<String>,
    /// The guest, if the journal does not name it
    #[arg(long, value_name = "NAME")]
    pub(crate) guest: Option<String>,
    /// Even if the journal is sound: if the other host's journal of this migration was lost or set
    /// aside, nothing else ends the migration here
    #[arg(long, requires = "belongs")]
    pub(crate) although_sound: bool,
    /// The reason, for the tombstone
    #[arg(long, value_name = "TEXT")]
    pub(crate) because: Option<String>,
    /// The agent's state folder [default: the one that its configuration names]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) state: Option<PathBuf>,
    /// The agent's configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, value_name = "FILE", conflicts_with = "state")]
    pub(crate) config: Option<PathBuf>,
}

/// The host that a guest belongs to, from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Belongs {
    /// This host
    Here,
    /// The other host
    There,
}

#[derive(Debug, Args)]
pub(crate) struct ShowJournalArgs {
    /// The migration's id, the beginning of its id, or a journal's file; without it, all journals
    /// are listed
    #[arg(value_name = "ID|FILE")]
    pub(crate) journal: Option<String>,
    /// The agent's state folder [default: the one that its configuration names]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) state: Option<PathBuf>,
    /// The agent's configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, value_name = "FILE", conflicts_with = "state")]
    pub(crate) config: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ImageArgs {
    /// The repository: a folder, s3://BUCKET or s3://BUCKET/PREFIX [default: the one that the
    /// agent's configuration names]
    #[arg(long, global = true, value_name = "PLACE")]
    pub(crate) repository: Option<Place>,
    /// The agent's configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: ImageCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Put a disk into the repository
    Import(ImportArgs),
    /// List the images
    List,
    /// Read images, and compare them with their digests
    Verify {
        /// Names or ids, or beginnings of ids [default: all images]
        #[arg(value_name = "IMAGE")]
        images: Vec<String>,
    },
    /// Fetch an image to this host, for guests whose disks use it as their base
    Fetch {
        /// Its name or id, or the beginning of its id
        #[arg(value_name = "IMAGE")]
        image: String,
    },
    /// Remove images, and the content that no other image has
    Remove(RemoveArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ImportArgs {
    /// The disk
    pub(crate) file: PathBuf,
    /// The image's name
    #[arg(long)]
    pub(crate) name: Option<ImageName>,
    /// The file's format [default: by its extension: .raw, .img or .qcow2]
    #[arg(long)]
    pub(crate) format: Option<DiskFormat>,
    /// Store everything again, even what is there already: it may be damaged
    #[arg(long)]
    pub(crate) rewrite: bool,
}

/// What the file of a disk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DiskFormat {
    /// The disk, byte for byte
    Raw,
    /// QEMU's own format
    Qcow2,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveArgs {
    /// Names or ids, or beginnings of ids
    #[arg(required = true, value_name = "IMAGE")]
    pub(crate) images: Vec<String>,
    /// Even while images are imported: those imports fail, and must be started again
    #[arg(long)]
    pub(crate) overrule_imports: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definitions_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn quantities_are_read_with_their_units() {
        let cli = Cli::try_parse_from([
            "longhaul",
            "migrate",
            "web-7",
            "--to",
            "paris-2",
            "--downtime",
            "1.5s",
            "--bandwidth",
            "80mbit",
            "--compression",
            "zstd:-3",
            "--delta-cache",
            "64MiB",
        ]);
        let Command::Migrate(migrate) = cli.unwrap().command else {
            panic!("another command");
        };
        assert_eq!(migrate.wishes.downtime, Duration::from_millis(1500));
        assert_eq!(migrate.wishes.bandwidth, Some(80_000_000));
        assert_eq!(migrate.patience, Duration::from_secs(60));
        assert_eq!(
            migrate.encoding.compression,
            Some(CompressionChoice::Zstd(-3))
        );
        assert_eq!(
            migrate.encoding.delta_cache,
            Some(DeltaCache::Bytes(64 << 20))
        );
        let wrong = Cli::try_parse_from(["longhaul", "limit", "7f", "80"]).unwrap_err();
        assert!(wrong.to_string().contains("80mbit"), "{wrong}");
    }
}
