//! Implements `replicate`, `replicas` and `failover`.

use crate::cli::args::{FailoverArgs, ReplicasArgs, ReplicasCommand, ReplicateArgs};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::paint::{Line, Tone};
use crate::cli::picture::Picture;
use crate::cli::resolve::{confirm, said};
use crate::cli::show::replica as shown;
use crate::cli::{done, now_unix_ms, show};
use longhaul_api::{Client, FailOver, ReplicateGuest, Retention};
use longhaul_migration::host::config::Config;
use longhaul_migration::replica_folder;
use longhaul_parcel::{Replica, ReplicaError};
use serde::Serialize;
use serde_json::json;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// How long a version that arrives is waited for.
const BUSY_WITHIN: Duration = Duration::from_secs(60);

/// A version that was restored.
#[derive(Debug, Serialize)]
pub(crate) struct RestoredDocument {
    pub(crate) guest: String,
    pub(crate) version: u64,
    pub(crate) unix_ms: u64,
    pub(crate) disks: Vec<PathBuf>,
}

/// Begins, lists or ends replications.
pub(crate) async fn replicate(
    client: &Client,
    output: &Output,
    args: ReplicateArgs,
) -> Result<u8, CliError> {
    let Some(guest) = args.guest else {
        let all = client.replications().await?;
        show(output, &all, || {
            shown::replications(&all.replications, now_unix_ms())
        })?;
        return Ok(0);
    };
    if args.stop {
        client.stop_replication(&guest).await?;
        show(output, &json!({ "stopped": guest }), || {
            done(format!(
                "{guest} is replicated no longer; the other host keeps what it has"
            ))
        })?;
        return Ok(0);
    }
    let Some(to) = args.to else {
        let all = client.replications().await?;
        let mut all = all.replications.into_iter();
        let one = all.find(|replication| replication.guest == guest);
        let one = one.ok_or_else(|| {
            CliError::usage(
                format!("{guest} is not replicated"),
                format!("longhaul replicate {guest} --to HOST --every 10min"),
            )
        })?;
        show(output, &one, || {
            shown::replications(std::slice::from_ref(&one), now_unix_ms())
        })?;
        return Ok(0);
    };
    let how = ReplicateGuest {
        to,
        every_s: args.every.as_secs(),
        keep: Retention {
            last: args.keep,
            hourly: args.keep_hourly,
            daily: args.keep_daily,
            weekly: args.keep_weekly,
        },
        no_freeze: args.no_freeze,
    };
    let replication = client.replicate(&guest, &how).await?;
    show(output, &replication, || shown::begun(&replication))?;
    Ok(0)
}

/// Lists, restores, verifies or removes replicas.
pub(crate) async fn replicas(
    client: impl Fn() -> Result<Client, CliError>,
    output: &Output,
    args: ReplicasArgs,
) -> Result<u8, CliError> {
    let config = || Config::read(args.config.as_deref());
    match args.command.unwrap_or(ReplicasCommand::List) {
        ReplicasCommand::List => {
            let all = client()?.replicas().await?;
            show(output, &all, || {
                shown::replicas(&all.replicas, now_unix_ms())
            })?;
        }
        ReplicasCommand::Restore {
            guest,
            version,
            into,
        } => restore(output, &config()?, (&guest, version), &into)?,
        ReplicasCommand::Verify { guest } => verify(output, &config()?, &guest)?,
        ReplicasCommand::Remove { guest, yes } => {
            if !yes {
                let text = format!("All versions of the replica of {guest} here will be removed.");
                output.aside(&[Line::text(text)]);
                confirm(&guest, &guest)?;
            }
            client()?.remove_replica(&guest).await?;
            show(output, &json!({ "removed": guest }), || {
                done(format!("the replica of {guest} is removed"))
            })?;
        }
    }
    Ok(0)
}

fn failed(error: &ReplicaError) -> CliError {
    CliError::parcel(error.to_string(), None)
}

/// Opens the replica of a guest, as soon as no version arrives.
fn open(config: &Config, guest: &str) -> Result<Replica, CliError> {
    let none = || {
        CliError::usage(
            format!("this host keeps no replica of {guest}"),
            "longhaul replicas lists those that it keeps",
        )
    };
    let folder = replica_folder(&config.state, guest).ok_or_else(none)?;
    let until = Instant::now() + BUSY_WITHIN;
    loop {
        match Replica::open(&folder) {
            Ok(replica) => return replica.ok_or_else(none),
            Err(ReplicaError::Busy(_)) if Instant::now() < until => {
                thread::sleep(Duration::from_millis(200));
            }
            Err(error) => return Err(failed(&error)),
        }
    }
}

fn restore(
    output: &Output,
    config: &Config,
    (guest, version): (&str, Option<u64>),
    into: &Path,
) -> Result<(), CliError> {
    let replica = open(config, guest)?;
    let versions = replica.versions();
    let found = match version {
        Some(version) => versions.iter().find(|it| it.version == version),
        None => versions.iter().rfind(|it| it.consistent),
    };
    let found = found.ok_or_else(|| {
        CliError::usage(
            format!("the replica of {guest} has no such version"),
            "longhaul replicas lists the versions",
        )
    })?;
    fs::create_dir_all(into)?;
    let disks = replica.spec().disks.iter();
    let to: Vec<PathBuf> = disks
        .map(|disk| into.join(format!("{}.img", disk.name)))
        .collect();
    let all: u64 = found.disks.iter().map(|disk| disk.bytes).sum();
    let picture = Picture::new(output);
    let restored = replica.restore(found.version, &to, &mut |copied| {
        picture.draw(|width| shown::working("copying", guest, (copied, all), width));
    });
    picture.clear();
    restored.map_err(|error| failed(&error))?;
    let document = RestoredDocument {
        guest: guest.to_owned(),
        version: found.version,
        unix_ms: found.time * 1000,
        disks: to,
    };
    show(output, &document, || shown::restored(&document))
}

fn verify(output: &Output, config: &Config, guest: &str) -> Result<(), CliError> {
    let replica = open(config, guest)?;
    let newest = replica.newest().map(|newest| newest.disks.clone());
    let all: u64 = newest.iter().flatten().map(|disk| disk.bytes).sum();
    let picture = Picture::new(output);
    let verified = replica.verify(&mut |read| {
        picture.draw(|width| shown::working("reading", guest, (read, all), width));
    });
    picture.clear();
    verified.map_err(|error| failed(&error))?;
    let document = json!({ "guest": guest, "good": true });
    show(output, &document, || {
        done(format!(
            "the images of {guest} have what its newest version says"
        ))
    })
}

/// Lets a guest run here from its replica.
pub(crate) async fn failover(
    client: &Client,
    output: &Output,
    args: FailoverArgs,
) -> Result<u8, CliError> {
    let guest = &args.guest;
    let replicas = client.replicas().await?;
    let replica = replicas.replicas.iter().find(|it| it.guest == *guest);
    let replica = replica.ok_or_else(|| {
        CliError::usage(
            format!("this host keeps no replica of {guest}"),
            "longhaul replicas lists those that it keeps",
        )
    })?;
    let other_side = said(args.other_side);
    let asked = args.version.or(replica.failing_over_to);
    output.aside(&shown::stakes(replica, asked, other_side, now_unix_ms()));
    if !args.yes {
        confirm(guest, guest)?;
    }
    let how = FailOver {
        other_side,
        because: args.because,
        version: args.version,
        no_start: args.no_start,
    };
    let done = client.fail_over(guest, &how).await?;
    show(output, &done, || shown::failed_over(&done))?;
    // The guest was to run, and does not.
    Ok(if done.trouble.is_some() { 1 } else { 0 })
}

impl RestoredDocument {
    /// Returns a line for each disk.
    pub(crate) fn paths(&self) -> Vec<Line> {
        let each = self.disks.iter();
        each.map(|disk| Line::text(format!("  {}", disk.display())))
            .collect()
    }
}

/// Returns the tone of a figure that may be bad.
pub(crate) fn tone(is_bad: bool) -> Tone {
    match is_bad {
        true => Tone::Bad,
        false => Tone::Plain,
    }
}
