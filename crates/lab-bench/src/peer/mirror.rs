//! Moves a guest with local disks by QEMU's own migration, in libvirt's order: the disks are
//! mirrored to the destination's QEMU over NBD, then memory follows, and after the guest has
//! stopped the mirrors are ended before the destination may run it.

use super::{PORT, PeerResult, cancel};
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::peer::{POLL_EVERY, PeerQemu, SETTLE_LIMIT, status_of, unexpected};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const NBD_PORT: u16 = 10809;

/// When a write of the guest reaches the mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyMode {
    /// Later: the written blocks are marked dirty, and copied again.
    Background,
    /// Before the guest's write completes.
    WriteBlocking,
}

impl CopyMode {
    /// Returns its name in rows.
    pub fn system(self) -> &'static str {
        match self {
            Self::Background => "qemu-mirror",
            Self::WriteBlocking => "qemu-mirror-write-blocking",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Background => "background",
            Self::WriteBlocking => "write-blocking",
        }
    }
}

/// The parameters of such a move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MirrorMove<'a> {
    /// The guest's disks, by their names.
    pub disks: &'a [String],
    /// When writes reach the mirror.
    pub copy_mode: CopyMode,
    /// The destination's address on the link.
    pub destination: &'a str,
    /// The requested downtime.
    pub downtime_ms: u64,
    /// The time limit.
    pub limit: Duration,
}

/// A move under way.
struct Mirroring<'a> {
    asked: &'a MirrorMove<'a>,
    source: &'a mut PeerQemu,
    destination: &'a mut PeerQemu,
    began: Instant,
    /// Bytes copied by each disk's job.
    copied: Vec<u64>,
}

/// Why a move did not complete.
enum Stopped {
    /// QEMU's error, or the time limit.
    Failed(String),
    Error(LabError),
}

impl From<LabError> for Stopped {
    fn from(error: LabError) -> Self {
        Self::Error(error)
    }
}

impl MirrorMove<'_> {
    /// Moves the guest of `source` to `destination`, which was started to wait for it and to keep
    /// it stopped.
    ///
    /// # Errors
    /// When a QEMU refuses or dies; a move that exceeds its limit is a result, and leaves the guest
    /// at the source without a mirror.
    pub fn run(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
    ) -> Result<PeerResult, LabError> {
        let mut mirroring = Mirroring {
            asked: self,
            source,
            destination,
            began: Instant::now(),
            copied: vec![0; self.disks.len()],
        };
        mirroring.prepare()?;
        mirroring.began = Instant::now();
        mirroring.start_jobs()?;
        let failure = match mirroring.run() {
            Ok(()) => None,
            Err(Stopped::Failed(why)) => Some(why),
            Err(Stopped::Error(error)) => return Err(error),
        };
        let (began, ended) = (mirroring.began, Instant::now());
        if failure.is_some() {
            mirroring.give_up()?;
        }
        let disk_bytes = mirroring.copied.iter().sum();
        let result = PeerResult::of(source, [began, ended], failure)?;
        Ok(PeerResult {
            disk_bytes: Some(disk_bytes),
            ..result
        })
    }
}

impl Mirroring<'_> {
    /// Performs the steps that do not count, because they are possible long before a move.
    fn prepare(&mut self) -> Result<(), LabError> {
        let pause =
            json!({"capabilities": [{"capability": "pause-before-switchover", "state": true}]});
        self.on_source("migrate-set-capabilities", &pause)?;
        let downtime_ms = self.asked.downtime_ms;
        // max-bandwidth 0: as fast as the link takes it.
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": downtime_ms});
        self.on_source("migrate-set-parameters", &parameters)?;
        let anywhere = json!({"host": "0.0.0.0", "port": NBD_PORT.to_string()});
        let address = json!({"addr": {"type": "inet", "data": anywhere}});
        self.on_destination("nbd-server-start", &address)?;
        for disk in self.asked.disks {
            let export = json!({
                "type": "nbd", "id": format!("export-{disk}"), "node-name": format!("disk-{disk}"),
                "name": disk, "writable": true,
            });
            self.on_destination("block-export-add", &export)?;
        }
        let listen = json!({"uri": format!("tcp:0.0.0.0:{PORT}")});
        self.on_destination("migrate-incoming", &listen).map(drop)
    }

    fn start_jobs(&mut self) -> Result<(), LabError> {
        for disk in self.asked.disks {
            let server = json!({
                "type": "inet", "host": self.asked.destination, "port": NBD_PORT.to_string(),
            });
            let target = json!({
                "driver": "nbd", "node-name": target(disk), "server": server, "export": disk,
                "discard": "unmap",
            });
            self.on_source("blockdev-add", &target)?;
            let job = json!({
                "job-id": job(disk), "device": format!("disk-{disk}"), "target": self::target(disk),
                "sync": "full", "copy-mode": self.asked.copy_mode.name(), "auto-dismiss": false,
            });
            self.on_source("blockdev-mirror", &job)?;
        }
        Ok(())
    }

    /// Runs the move until the guest runs at the destination.
    fn run(&mut self) -> Result<(), Stopped> {
        self.until(|it| Ok(it.jobs()?.iter().all(|job| status_of(job) == "ready")))?;
        let address = self.asked.destination;
        let target = json!({"uri": format!("tcp:{address}:{PORT}")});
        self.on_source("migrate", &target)?;
        self.until(|it| it.source_is("pre-switchover"))?;
        // The guest is stopped: the dirty blocks are copied, and the jobs end without switching it
        // to the copy.
        self.cancel_jobs(false)?;
        self.until(Self::jobs_are_concluded)?;
        let state = json!({"state": "pre-switchover"});
        self.on_source("migrate-continue", &state)?;
        self.until(|it| Ok(it.source_is("completed")? && it.destination.status()? == "paused"))?;
        self.on_destination("nbd-server-stop", &json!({}))?;
        self.on_destination("cont", &json!({}))?;
        self.until(|it| Ok(it.destination.status()? == "running"))
    }

    fn until(&mut self, done: impl Fn(&mut Self) -> Result<bool, LabError>) -> Result<(), Stopped> {
        while !done(self)? {
            if let Some(failure) = self.failure()? {
                return Err(Stopped::Failed(failure));
            }
            interrupt::sleep(POLL_EVERY)?;
        }
        Ok(())
    }

    fn jobs_are_concluded(&mut self) -> Result<bool, LabError> {
        let jobs = self.jobs()?;
        Ok(jobs.iter().all(|job| status_of(job) == "concluded"))
    }

    /// Returns why the move cannot go on.
    fn failure(&mut self) -> Result<Option<String>, LabError> {
        for job in self.jobs()? {
            if let Some(error) = job.get("error").and_then(Value::as_str) {
                return Ok(Some(format!("QEMU's mirror failed: {error}")));
            }
        }
        if ["failed", "cancelled"].contains(&self.source.migration_status()?.as_str()) {
            return Ok(Some("QEMU failed to migrate".to_owned()));
        }
        let late = self.began.elapsed() > self.asked.limit;
        let seconds = self.asked.limit.as_secs();
        Ok(late.then(|| format!("it had not converged after {seconds} s")))
    }

    /// Ends all jobs, so that the guest goes on at the source alone.
    fn give_up(&mut self) -> Result<(), LabError> {
        if !["", "completed", "failed", "cancelled"]
            .contains(&self.source.migration_status()?.as_str())
        {
            cancel(self.source)?;
        }
        self.cancel_jobs(true)?;
        let began = Instant::now();
        while !self.jobs_are_concluded()? {
            if began.elapsed() > SETTLE_LIMIT {
                return Err(unexpected("a mirror that was cancelled did not end"));
            }
            interrupt::sleep(POLL_EVERY)?;
        }
        for disk in self.asked.disks {
            self.on_source("job-dismiss", &json!({"id": job(disk)}))?;
            self.on_source("blockdev-del", &json!({"node-name": target(disk)}))?;
        }
        Ok(())
    }

    fn cancel_jobs(&mut self, force: bool) -> Result<(), LabError> {
        for disk in self.asked.disks {
            let job = job(disk);
            let asked = json!({"device": job, "force": force});
            let cancelled = self.on_source("block-job-cancel", &asked);
            // A job that has just ended cannot be cancelled any more.
            let ended = |it: &Value| it["id"] == job.as_str() && status_of(it) == "concluded";
            if cancelled.is_err() && !self.jobs()?.iter().any(ended) {
                return cancelled.map(drop);
            }
        }
        Ok(())
    }

    /// Returns the mirrors' jobs, and records what they have copied.
    fn jobs(&mut self) -> Result<Vec<Value>, LabError> {
        let jobs = self.on_source("query-jobs", &json!({}))?;
        let jobs = jobs.as_array().cloned().unwrap_or_default();
        for (disk, copied) in self.asked.disks.iter().zip(&mut self.copied) {
            let of_disk = jobs.iter().find(|it| it["id"] == job(disk).as_str());
            let progress = of_disk.and_then(|it| it["current-progress"].as_u64());
            *copied = progress.map_or(*copied, |progress| progress.max(*copied));
        }
        Ok(jobs)
    }

    fn source_is(&mut self, status: &str) -> Result<bool, LabError> {
        Ok(self.source.migration_status()? == status)
    }

    fn on_source(&mut self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        self.source.execute(command, arguments)
    }

    fn on_destination(&mut self, command: &str, arguments: &Value) -> Result<Value, LabError> {
        self.destination.execute(command, arguments)
    }
}

fn job(disk: &str) -> String {
    format!("mirror-{disk}")
}

fn target(disk: &str) -> String {
    format!("target-{disk}")
}
