//! The arguments of replicas.

use super::{OtherSide, parse_duration};
use clap::builder::RangedI64ValueParser;
use clap::{Args, Subcommand};
use std::path::PathBuf;
use std::time::Duration;

fn periods() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(0..=1000)
}

#[derive(Debug, Args)]
pub(crate) struct ReplicateArgs {
    /// The guest [default: list the replications of this host's guests]
    pub(crate) guest: Option<String>,
    /// The host that keeps the replica
    #[arg(long, value_name = "HOST", requires = "guest")]
    pub(crate) to: Option<String>,
    /// Time from one version to the next: 10s to 7d
    #[arg(long, value_name = "TIME", default_value = "10min", value_parser = parse_duration)]
    pub(crate) every: Duration,
    /// How many of the last versions the other host keeps
    #[arg(
        long,
        value_name = "NUMBER",
        default_value = "24",
        value_parser = clap::value_parser!(u32).range(1..=1000)
    )]
    pub(crate) keep: u32,
    /// For how many hours it also keeps the last version of each, in UTC
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = periods())]
    pub(crate) keep_hourly: u32,
    /// The same for days
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = periods())]
    pub(crate) keep_daily: u32,
    /// The same for weeks, from Monday
    #[arg(long, value_name = "NUMBER", default_value = "0", value_parser = periods())]
    pub(crate) keep_weekly: u32,
    /// Do not freeze the guest's file systems, also if its agent could do that
    #[arg(long)]
    pub(crate) no_freeze: bool,
    /// End the replication; the other host keeps what it has
    #[arg(long, requires = "guest", conflicts_with = "to")]
    pub(crate) stop: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ReplicasArgs {
    /// The agent's configuration [default: /etc/longhaul/agent.toml, which may be missing]
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(subcommand)]
    pub(crate) command: Option<ReplicasCommand>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ReplicasCommand {
    /// List the replicas that this host keeps
    List,
    /// Copy a version of a guest's disks to a folder; the replica stays as it is
    Restore {
        /// The guest
        guest: String,
        /// The version [default: the newest one of one moment]
        #[arg(long, value_name = "NUMBER")]
        version: Option<u64>,
        /// Where the disks go; it has no files of their names
        #[arg(long, value_name = "FOLDER")]
        into: PathBuf,
    },
    /// Read the images of a replica, and compare them with its newest version
    Verify {
        /// The guest
        guest: String,
    },
    /// Remove a replica with all its versions
    Remove {
        /// The guest
        guest: String,
        /// Do not ask for confirmation
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Args)]
pub(crate) struct FailoverArgs {
    /// The guest
    pub(crate) guest: String,
    /// Why the host that it comes from cannot run it
    #[arg(long, value_name = "STATE")]
    pub(crate) other_side: OtherSide,
    /// The reason, for the log
    #[arg(long, value_name = "TEXT")]
    pub(crate) because: String,
    /// The version [default: the newest one of one moment]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) version: Option<u64>,
    /// Do not start the guest
    #[arg(long)]
    pub(crate) no_start: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    pub(crate) yes: bool,
}
