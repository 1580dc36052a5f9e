//! Sets a source QEMU up for a move, and restores its earlier settings.

use crate::balloon::tells_free_pages;
use crate::observe::machine_type;
use crate::qmp::{COMMAND_TIMEOUT, Qmp, QmpError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time limit for a cancelled migration to end.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval between queries of its state.
const POLL: Duration = Duration::from_millis(10);

/// Why a source's QEMU could not be set up or restored.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// QEMU did not answer, or refused.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// QEMU's answer is not understood.
    #[error("QEMU's answer to `{command}` is not understood")]
    Answer {
        /// The command.
        command: &'static str,
    },
    /// The guest's run state does not allow a move.
    #[error("the guest is `{}`: {}", .0, why_not(.0))]
    RunState(String),
    /// QEMU's earlier settings cannot be saved, or read again.
    #[error("QEMU's settings before the move cannot be kept in {}: {why}", path.display())]
    Keep {
        /// The file.
        path: PathBuf,
        /// The system's error.
        why: String,
    },
    /// A migration is under way already.
    #[error("QEMU has a migration under way already ({0}): end that one first")]
    Migrating(String),
    /// QEMU reports that it cannot migrate.
    #[error("QEMU cannot move this guest: {0}")]
    Blocked(String),
    /// The machine type writes a stream whose end cannot be detected.
    #[error("the machine has `suppress-vmdesc` on: its device state cannot be moved")]
    NoDescription,
    /// The migration does not end.
    #[error("QEMU has not ended its migration within {} s (it is `{status}`)", waited.as_secs())]
    DoesNotEnd {
        /// Its state.
        status: String,
        /// The time waited.
        waited: Duration,
    },
    /// The guest does not run again.
    #[error("the guest does not run again: it is `{0}`")]
    DoesNotRun(String),
}

/// Returns whether a QEMU misses some of the guest's writes, so that its memory is compared with
/// what was sent while the guest is stopped: one without KVM does.
pub async fn misses_writes(qmp: &Qmp) -> Result<bool, QmpError> {
    let kvm = qmp.query("query-kvm").await?;
    Ok(kvm["enabled"] == false)
}

/// A source's state and settings before the move.
#[derive(Debug, Clone)]
pub(crate) struct Before {
    /// Whether the guest ran.
    pub(crate) running: bool,
    /// Whether withholding the switchover acknowledgement keeps QEMU from completing.
    pub(crate) held_by_ack: bool,
    /// Whether QEMU misses some of the guest's writes.
    pub(crate) misses_writes: bool,
    /// Whether a balloon reports unused pages to QEMU.
    tells_free_pages: bool,
    /// Whether QEMU queries dirty pages in the middle of its passes too.
    pub(crate) looks_within_passes: bool,
    /// By how much QEMU may throttle the guest, in percent of its time.
    pub(crate) slow_at_most: Option<u8>,
    /// QEMU's settings, unless another program sets QEMU up.
    settings: Option<Settings>,
}

/// QEMU's migration settings, as far as a move changes them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Settings {
    capabilities: Vec<(String, bool)>,
    parameters: Map<String, Value>,
}

/// Parameters that every move sets, or may set.
const SET: [&str; 5] = [
    "max-bandwidth",
    "downtime-limit",
    "cpu-throttle-initial",
    "cpu-throttle-increment",
    "max-cpu-throttle",
];
/// QEMU first throttles a guest that writes too fast by this share of the maximum,
const SLOW_FIRST_SHARE: f64 = 0.5;
/// and by this many percent of the guest's time more after every second pass without improvement.
const SLOW_STEP_PERCENT: u64 = 10;
/// Parameters that a move sets where they differ: the stream goes through a socket of this host, as
/// a single stream.
const SET_TO: [(&str, &str); 4] = [
    ("mode", "normal"),
    ("tls-authz", ""),
    ("tls-creds", ""),
    ("tls-hostname", ""),
];
/// The maximum size of a settings file that is read, in bytes.
const SETTINGS_BYTES_MAX: u64 = 64 << 10;

impl Settings {
    /// Queries them.
    pub async fn look(qmp: &Qmp) -> Result<Self, SourceError> {
        let capabilities = capabilities(qmp).await?;
        let command = "query-migrate-parameters";
        let all = qmp.query(command).await?;
        let mut parameters = Map::new();
        for name in SET {
            let value = all[name].as_u64().ok_or(SourceError::Answer { command })?;
            parameters.insert(name.to_owned(), value.into());
        }
        for (name, wanted) in SET_TO {
            if let Some(value) = all[name].as_str().filter(|value| *value != wanted) {
                parameters.insert(name.to_owned(), value.into());
            }
        }
        Ok(Self {
            capabilities,
            parameters,
        })
    }

    /// Clears settings that a move does not allow.
    async fn clear(&self, qmp: &Qmp) -> Result<(), SourceError> {
        let changed = SET_TO
            .into_iter()
            .filter(|(name, _)| self.parameters.contains_key(*name));
        let changed: Map<String, Value> = changed
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        if !changed.is_empty() {
            qmp.execute("migrate-set-parameters", changed.into(), COMMAND_TIMEOUT)
                .await?;
        }
        Ok(())
    }

    /// Restores them in QEMU.
    pub async fn restore(&self, qmp: &Qmp) -> Result<(), SourceError> {
        let now = capabilities(qmp).await?;
        let changed = self.capabilities.iter().filter(|one| !now.contains(one));
        let changed = changed.map(|(name, on)| (name.as_str(), *on));
        set_capabilities(qmp, changed).await?;
        let parameters = self.parameters.clone().into();
        qmp.execute("migrate-set-parameters", parameters, COMMAND_TIMEOUT)
            .await?;
        Ok(())
    }

    /// Saves them in a file, for an agent that is restarted in the middle of a move. An existing
    /// file is from an earlier part of the same move, and stays.
    pub fn keep(&self, path: &Path) -> Result<(), SourceError> {
        let write = || -> io::Result<()> {
            if path.exists() {
                return Ok(());
            }
            let new = path.with_extension("new");
            let mut file = fs::File::create(&new)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(&new, path)?;
            fs::File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
        };
        write().map_err(kept(path))
    }

    /// Restores QEMU's settings from a file, and removes the file; without a file it does nothing.
    pub async fn restore_kept(qmp: &Qmp, path: &Path) -> Result<(), SourceError> {
        let mut bytes = Vec::new();
        match fs::File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(kept(path)(error)),
            Ok(file) => file
                .take(SETTINGS_BYTES_MAX)
                .read_to_end(&mut bytes)
                .map_err(kept(path))?,
        };
        let settings: Self =
            serde_json::from_slice(&bytes).map_err(|error| kept(path)(error.into()))?;
        settings.restore(qmp).await?;
        fs::remove_file(path).map_err(kept(path))
    }
}

fn kept(path: &Path) -> impl Fn(io::Error) -> SourceError + use<> {
    let path = path.to_owned();
    move |error| SourceError::Keep {
        path: path.clone(),
        why: error.to_string(),
    }
}

/// Returns whether a guest in this state runs; an error where it cannot be moved.
pub fn runs(state: &str) -> Result<bool, SourceError> {
    match state {
        "running" => Ok(true),
        // It is stopped with an I/O error, and QEMU's stream reports that to the destination.
        "paused" | "prelaunch" | "io-error" => Ok(false),
        other => Err(SourceError::RunState(other.to_owned())),
    }
}

/// Returns why a guest cannot be moved in a state, and what to do.
fn why_not(state: &str) -> &'static str {
    match state {
        "suspended" => {
            "a QEMU 10.0 that had to take a suspended guest back would end itself; wake it first"
        }
        "shutdown" => {
            "it has shut down, and would run on if it had to be taken back; start it at the \
             destination"
        }
        "guest-panicked" => {
            "its kernel gave up, and would run on if it had to be taken back; reset it first, or \
             start it at the destination"
        }
        "postmigrate" => "something else has moved it already; end this copy, or let it run (cont)",
        _ => "it can be moved while it runs, is paused, or is stopped by an I/O error",
    }
}

/// Capabilities that a move needs; all others that matter to a source are off.
const NEEDED: [&str; 2] = ["return-path", "events"];
/// The capability that makes a QEMU wait for the switchover acknowledgement.
const SWITCHOVER_ACK: &str = "switchover-ack";
/// The capability that throttles a guest.
const SLOWS: &str = "auto-converge";
/// The capability that keeps a QEMU from asking a balloon for free pages; post-copy itself is not
/// used.
const SILENCES_BALLOON: &str = "postcopy-ram";
/// The first QEMU that was seen to query dirty pages all the time with that capability on, ten
/// times a second and more; 7.2 does not.
const LOOKS_WITHIN_PASSES_FROM: (u32, u32) = (11, 1);
/// A capability of destinations only.
const LEFT_ALONE: &str = "late-block-activate";

impl Before {
    /// Queries everything, and changes nothing. The guest may be throttled by up to `slow_at_most`
    /// percent of its time.
    pub(crate) async fn look(qmp: &Qmp, slow_at_most: Option<u8>) -> Result<Self, SourceError> {
        let running = runs(&run_state(qmp).await?)?;
        let migration = qmp.query("query-migrate").await?;
        if let Some(status) = migration["status"]
            .as_str()
            .filter(|status| !is_over(status))
        {
            return Err(SourceError::Migrating(status.to_owned()));
        }
        if let Some(reasons) = migration["blocked-reasons"].as_array() {
            let reasons: Vec<&str> = reasons.iter().filter_map(Value::as_str).collect();
            return Err(SourceError::Blocked(reasons.join("; ")));
        }
        let devices = qmp.query("query-memory-devices").await?;
        let mut kinds = devices.as_array().into_iter().flatten();
        if kinds.any(|device| device["type"] == "virtio-mem") {
            return Err(SourceError::Blocked(
                "it has a virtio-mem device".to_owned(),
            ));
        }
        let property = json!({"path": "/machine", "property": "suppress-vmdesc"});
        let suppressed = qmp.execute("qom-get", property, COMMAND_TIMEOUT).await;
        if suppressed.is_ok_and(|suppressed| suppressed == json!(true)) {
            return Err(SourceError::NoDescription);
        }
        let misses_writes = misses_writes(qmp).await?;
        let settings = Settings::look(qmp).await?;
        let held_by_ack = is_held_by_ack(qmp).await?;
        let tells_free_pages = tells_free_pages(qmp).await?;
        let version = qmp.version();
        Ok(Self {
            running,
            held_by_ack,
            misses_writes,
            tells_free_pages,
            looks_within_passes: tells_free_pages
                && !held_by_ack
                && (version.major, version.minor) >= LOOKS_WITHIN_PASSES_FROM,
            slow_at_most,
            settings: Some(settings),
        })
    }

    /// As [`Self::look`], where another program sets QEMU up. That one does not let QEMU wait for
    /// the switchover acknowledgement, nor throttle the guest.
    pub(crate) async fn look_at_set_up(qmp: &Qmp) -> Result<Self, SourceError> {
        let before = Self {
            held_by_ack: false,
            slow_at_most: None,
            settings: None,
            ..Self::look(qmp, None).await?
        };
        match before.tells_free_pages {
            true => Err(SourceError::Blocked(
                "its balloon reports free pages (free-page-hint), which cannot be kept from QEMU \
                 where another program sets it up"
                    .to_owned(),
            )),
            false => Ok(before),
        }
    }

    /// Returns whether QEMU is held by its rate. It keeps a lock while it blocks in a write, and a
    /// balloon that reports to it waits for that lock with one of its own, which `stop` and a reset
    /// of the guest need.
    pub(crate) fn holds_by_rate(&self) -> bool {
        self.tells_free_pages && self.held_by_ack && self.running
    }

    /// Sets capabilities and parameters for a move.
    pub(crate) async fn set(&self, qmp: &Qmp, max_bandwidth: u64) -> Result<(), SourceError> {
        let Some(settings) = &self.settings else {
            return Ok(());
        };
        let wanted = settings
            .capabilities
            .iter()
            .filter(|(name, _)| name != LEFT_ALONE);
        let needed = |name: &str| match name {
            SWITCHOVER_ACK => self.held_by_ack,
            SLOWS => self.slow_at_most.is_some(),
            SILENCES_BALLOON => self.tells_free_pages && !self.held_by_ack,
            name => NEEDED.contains(&name),
        };
        let wanted = wanted.map(|(name, on)| (name, *on, needed(name)));
        let changed = wanted.filter(|(_, on, needed)| on != needed);
        let changed = changed.map(|(name, _, needed)| (name.as_str(), needed));
        set_capabilities(qmp, changed).await?;
        settings.clear(qmp).await?;
        if let Some(percent) = self.slow_at_most {
            let first = (f64::from(percent) * SLOW_FIRST_SHARE).max(1.0) as u64;
            let arguments = json!({
                "cpu-throttle-initial": first,
                "cpu-throttle-increment": SLOW_STEP_PERCENT,
                "max-cpu-throttle": percent,
            });
            qmp.execute("migrate-set-parameters", arguments, COMMAND_TIMEOUT)
                .await?;
        }
        self.limit(qmp, max_bandwidth).await
    }

    /// Limits QEMU's rate, in bytes per second, 0 for no limit, and the downtime for which it
    /// completes by itself.
    pub(crate) async fn limit(&self, qmp: &Qmp, max_bandwidth: u64) -> Result<(), SourceError> {
        let downtime_limit = if self.held_by_ack { 300 } else { 1 };
        set_parameters(qmp, max_bandwidth, downtime_limit).await
    }

    /// Sets them back.
    pub(crate) async fn restore(&self, qmp: &Qmp) -> Result<(), SourceError> {
        match &self.settings {
            Some(settings) => settings.restore(qmp).await,
            None => Ok(()),
        }
    }
}

/// The last machine type version whose QEMU waits for the switchover acknowledgement whatever the
/// guest's devices.
const ACK_MACHINE_MAX: (u32, u32) = (11, 0);
/// The first QEMU for which that depends on the machine type.
const ACK_BY_MACHINE_FROM: (u32, u32) = (11, 1);

/// Returns whether this QEMU cannot complete while the switchover acknowledgement is withheld.
///
/// Before 8.1 there is none. Up to 11.0 QEMU waits for it. From 11.1 on QEMU waits only where a
/// device asks for it, which an ordinary guest's devices do not; machine types up to 11.0 keep the
/// old behaviour. A machine type whose version is not in its name counts as new.
pub(crate) async fn is_held_by_ack(qmp: &Qmp) -> Result<bool, QmpError> {
    let capabilities = qmp.query("query-migrate-capabilities").await?;
    let mut capabilities = capabilities.as_array().into_iter().flatten();
    if !capabilities.any(|one| one["capability"] == SWITCHOVER_ACK) {
        return Ok(false);
    }
    let version = qmp.version();
    if (version.major, version.minor) < ACK_BY_MACHINE_FROM {
        return Ok(true);
    }
    let machine = machine_type(qmp).await?;
    Ok(version_of_machine(&machine).is_some_and(|version| version <= ACK_MACHINE_MAX))
}

/// Returns the version at the end of a machine type's name: (11, 0) of `pc-q35-11.0`.
fn version_of_machine(name: &str) -> Option<(u32, u32)> {
    let (major, minor) = name.rsplit_once('-')?.1.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

async fn capabilities(qmp: &Qmp) -> Result<Vec<(String, bool)>, SourceError> {
    let answer = qmp.query("query-migrate-capabilities").await?;
    let capabilities = answer.as_array().and_then(|capabilities| {
        let read = |one: &Value| {
            Some((
                one["capability"].as_str()?.to_owned(),
                one["state"].as_bool()?,
            ))
        };
        capabilities.iter().map(read).collect()
    });
    capabilities.ok_or(SourceError::Answer {
        command: "query-migrate-capabilities",
    })
}

pub(crate) async fn set_capabilities(
    qmp: &Qmp,
    changes: impl Iterator<Item = (&str, bool)>,
) -> Result<(), SourceError> {
    let change = |(name, on)| json!({"capability": name, "state": on});
    let changes: Vec<Value> = changes.map(change).collect();
    if !changes.is_empty() {
        let arguments = json!({"capabilities": changes});
        qmp.execute("migrate-set-capabilities", arguments, COMMAND_TIMEOUT)
            .await?;
    }
    Ok(())
}

pub(crate) async fn set_parameters(
    qmp: &Qmp,
    max_bandwidth: u64,
    downtime_limit: u64,
) -> Result<(), SourceError> {
    let arguments = json!({"max-bandwidth": max_bandwidth, "downtime-limit": downtime_limit});
    qmp.execute("migrate-set-parameters", arguments, COMMAND_TIMEOUT)
        .await?;
    Ok(())
}

pub(crate) async fn set_bandwidth(qmp: &Qmp, max_bandwidth: u64) -> Result<(), SourceError> {
    let arguments = json!({"max-bandwidth": max_bandwidth});
    qmp.execute("migrate-set-parameters", arguments, COMMAND_TIMEOUT)
        .await?;
    Ok(())
}

/// Returns QEMU's run state.
pub(crate) async fn run_state(qmp: &Qmp) -> Result<String, SourceError> {
    let status = qmp.query("query-status").await?;
    let status = status["status"].as_str().map(str::to_owned);
    status.ok_or(SourceError::Answer {
        command: "query-status",
    })
}

/// Returns the state of QEMU's migration.
pub(crate) async fn migration_state(qmp: &Qmp) -> Result<String, SourceError> {
    let migration = qmp.query("query-migrate").await?;
    Ok(migration["status"].as_str().unwrap_or("none").to_owned())
}

/// Returns whether a migration in this state has ended.
pub(crate) fn is_over(status: &str) -> bool {
    matches!(status, "none" | "completed" | "failed" | "cancelled")
}

/// How a guest continues at its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Continuation {
    /// It runs.
    Running,
    /// It runs, unless it is paused: only its owner can have paused it.
    RunningUnlessPaused,
    /// It is stopped.
    Stopped,
}

impl Continuation {
    /// Returns the continuation of a guest that ran before its move (`ran`), and that the move has
    /// stopped since (`stopped`).
    pub fn of(ran: bool, stopped: bool) -> Self {
        match (ran, stopped) {
            (true, true) => Self::Running,
            (true, false) => Self::RunningUnlessPaused,
            (false, _) => Self::Stopped,
        }
    }
}

/// Ends any migration of a source's QEMU, and lets the guest continue. Also for a source whose
/// agent died: before the guest was released, this is sufficient.
pub async fn resume(qmp: &Qmp, how: Continuation) -> Result<(), SourceError> {
    let run = how != Continuation::Stopped;
    let start = Instant::now();
    let mut status = migration_state(qmp).await?;
    // A guest whose memory follows runs meanwhile, and a cancelled post-copy would end it.
    let is_over = |status: &str| is_over(status) || status.starts_with("postcopy-");
    if !is_over(&status) {
        qmp.query("migrate_cancel").await?;
    }
    while !is_over(&status) {
        if start.elapsed() > CANCEL_TIMEOUT {
            return Err(SourceError::DoesNotEnd {
                status,
                waited: start.elapsed(),
            });
        }
        tokio::time::sleep(POLL).await;
        status = migration_state(qmp).await?;
    }
    loop {
        let state = run_state(qmp).await?;
        match (state.as_str(), run) {
            ("running", true) | ("paused" | "prelaunch", false) => return Ok(()),
            ("paused", true) if how == Continuation::RunningUnlessPaused => return Ok(()),
            // It stopped by itself, and only its owner may let it go on.
            ("io-error" | "guest-panicked" | "shutdown" | "suspended", _) => return Ok(()),
            ("running", false) => drop(qmp.query("stop").await?),
            // QEMU is about to resume it, or to report that it ended.
            ("finish-migrate", _) if start.elapsed() < CANCEL_TIMEOUT => {
                tokio::time::sleep(POLL).await;
            }
            // In this state QEMU would refuse to migrate again; it returns to `paused` only by
            // running for a moment.
            ("postmigrate", false) => drop(qmp.query("cont").await?),
            ("paused" | "postmigrate" | "prelaunch", true) if start.elapsed() < CANCEL_TIMEOUT => {
                qmp.query("cont").await?;
            }
            _ => return Err(SourceError::DoesNotRun(state)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::version_of_machine;

    #[test]
    fn the_version_of_a_machine_type_stands_last_in_its_name() {
        for (name, version) in [
            ("pc-q35-11.0", Some((11, 0))),
            ("pc-i440fx-7.2", Some((7, 2))),
            ("pc-q35-rhel9.6.0", None),
            ("pc-q35-noble", None),
            ("microvm", None),
        ] {
            assert_eq!(version_of_machine(name), version, "{name}");
        }
    }
}
