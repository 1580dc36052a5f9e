//! Runs the baselines of Longhaul: QEMU's own ways to move the same guest over the same link, as an
//! administrator would use them.

pub mod mirror;

use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::peer::{POLL_EVERY, PeerQemu, SETTLE_LIMIT, status_of, unexpected};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 4444;

/// The longest downtime that can be asked of QEMU: the next pass is the last one.
const ANY_DOWNTIME_MS: u64 = 2_000_000;

/// The cache size of XBZRLE.
const XBZRLE_CACHE_BYTES: u64 = 512 << 20;

/// One of QEMU's ways to move a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerSystem {
    /// The default settings.
    Default,
    /// Deltas of pages that were sent before, from a large cache.
    Xbzrle,
    /// Several connections, each compressed.
    MultifdZstd,
    /// One pass, then the guest runs at the destination and faults in the missing pages.
    Postcopy,
    /// The same without that pass.
    PostcopyAtOnce,
    /// Post-copy after one pass over several connections, each compressed.
    MultifdZstdPostcopy,
}

impl PeerSystem {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Default,
        Self::Xbzrle,
        Self::MultifdZstd,
        Self::Postcopy,
        Self::PostcopyAtOnce,
        Self::MultifdZstdPostcopy,
    ];

    /// Returns its name in rows.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "qemu-default",
            Self::Xbzrle => "qemu-xbzrle",
            Self::MultifdZstd => "qemu-multifd-zstd",
            Self::Postcopy => "qemu-postcopy",
            Self::PostcopyAtOnce => "qemu-postcopy-at-once",
            Self::MultifdZstdPostcopy => "qemu-multifd-zstd-postcopy",
        }
    }

    /// Returns the strategy in its rows.
    pub fn strategy(self) -> &'static str {
        match self {
            Self::Postcopy | Self::PostcopyAtOnce | Self::MultifdZstdPostcopy => "postcopy",
            Self::Default | Self::Xbzrle | Self::MultifdZstd => "precopy",
        }
    }

    /// Returns the first QEMU that has it, where older ones do not.
    pub fn since(self) -> Option<&'static str> {
        match self {
            Self::MultifdZstdPostcopy => Some("10.1"),
            _ => None,
        }
    }

    /// Returns whether a QEMU of this version has it.
    pub fn is_in(self, version: &str) -> bool {
        let numbers = |text: &str| {
            let numbers = text.split('.').map_while(|number| number.parse().ok());
            numbers.collect::<Vec<u32>>()
        };
        let since = self.since();
        since.is_none_or(|since| numbers(version) >= numbers(since))
    }

    fn capabilities(self) -> Value {
        let names: &[&str] = match self {
            Self::Default => &[],
            Self::Xbzrle => &["xbzrle"],
            Self::MultifdZstd => &["multifd"],
            Self::Postcopy | Self::PostcopyAtOnce => &["postcopy-ram", "postcopy-preempt"],
            Self::MultifdZstdPostcopy => &["multifd", "postcopy-ram", "postcopy-preempt"],
        };
        let list: Vec<Value> = names
            .iter()
            .map(|name| json!({"capability": name, "state": true}))
            .collect();
        json!({ "capabilities": list })
    }

    fn parameters(self) -> Value {
        match self {
            Self::Default | Self::Postcopy | Self::PostcopyAtOnce => json!({}),
            Self::Xbzrle => json!({"xbzrle-cache-size": XBZRLE_CACHE_BYTES}),
            Self::MultifdZstd | Self::MultifdZstdPostcopy => {
                json!({
                    "multifd-channels": 4,
                    "multifd-compression": "zstd",
                    "multifd-zstd-level": 1
                })
            }
        }
    }

    fn prepare(self, qemu: &mut PeerQemu) -> Result<(), LabError> {
        qemu.execute("migrate-set-capabilities", &self.capabilities())?;
        qemu.execute("migrate-set-parameters", &self.parameters())
            .map(drop)
    }
}

/// The parameters of a baseline's move.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PeerMove<'a> {
    /// The system.
    pub system: PeerSystem,
    /// The destination's address on the link.
    pub destination: &'a str,
    /// The requested downtime.
    pub downtime_ms: u64,
    /// The time limit.
    pub limit: Duration,
    /// When a move that has not switched over is forced to; `None`: never.
    pub force_after: Option<Duration>,
}

/// The results of a baseline's move.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerResult {
    /// The time of the request.
    pub began: Instant,
    /// When the guest ran at the destination, or the move was given up.
    pub ended: Instant,
    /// Why it did not complete, if it did not.
    pub failure: Option<String>,
    /// Whether the switchover was forced.
    pub is_forced: bool,
    /// Bytes of memory sent, as QEMU counts them.
    pub memory_bytes: Option<u64>,
    /// Passes over memory, as QEMU counts them.
    pub passes: Option<u64>,
    /// Bytes of disks sent, as QEMU counts them, including repeated ones and zeros.
    pub disk_bytes: Option<u64>,
}

impl PeerResult {
    /// Creates a result with the source QEMU's statistics of memory.
    fn of(
        source: &mut PeerQemu,
        [began, ended]: [Instant; 2],
        failure: Option<String>,
    ) -> Result<Self, LabError> {
        let info = source.execute("query-migrate", &json!({}))?;
        let ram = |key: &str| info.get("ram")?.get(key)?.as_u64();
        Ok(Self {
            began,
            ended,
            failure,
            is_forced: false,
            memory_bytes: ram("transferred"),
            passes: ram("dirty-sync-count"),
            disk_bytes: None,
        })
    }
}

impl PeerMove<'_> {
    /// Moves the guest of `source` to `destination`, which was started to wait for it.
    ///
    /// # Errors
    /// When a QEMU refuses or dies; a move that exceeds its limit is a result.
    pub fn run(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
    ) -> Result<PeerResult, LabError> {
        self.system.prepare(source)?;
        self.system.prepare(destination)?;
        // max-bandwidth 0: as fast as the link takes it.
        let parameters = json!({"max-bandwidth": 0, "downtime-limit": self.downtime_ms});
        source.execute("migrate-set-parameters", &parameters)?;
        let listen = json!({"uri": format!("tcp:0.0.0.0:{PORT}")});
        destination.execute("migrate-incoming", &listen)?;

        let began = Instant::now();
        let target = json!({"uri": format!("tcp:{}:{PORT}", self.destination)});
        source.execute("migrate", &target)?;
        let (failure, is_forced) = self.wait(source, destination, began)?;
        let ended = Instant::now();
        let result = PeerResult::of(source, [began, ended], failure)?;
        Ok(PeerResult {
            is_forced,
            ..result
        })
    }

    /// Waits until the guest runs at the destination, and returns whether that was forced; returns
    /// the error otherwise.
    fn wait(
        &self,
        source: &mut PeerQemu,
        destination: &mut PeerQemu,
        began: Instant,
    ) -> Result<(Option<String>, bool), LabError> {
        let mut pushed = Pushed::default();
        let counts_passes = counts_passes(&source.execute("query-version", &json!({}))?);
        loop {
            let info = source.execute("query-migrate", &json!({}))?;
            match status_of(&info) {
                "completed" if destination.status()? == "running" => {
                    return Ok((None, pushed.is_forced));
                }
                "failed" => {
                    return Ok((Some("QEMU failed to migrate".to_owned()), pushed.is_forced));
                }
                "postcopy-paused" => {
                    return Ok((Some("QEMU's post-copy broke".to_owned()), pushed.is_forced));
                }
                "active" => {
                    let is_late = self.force_after.is_some_and(|it| began.elapsed() > it);
                    let is_due = self.system == PeerSystem::PostcopyAtOnce
                        || first_pass_is_over(&info, counts_passes);
                    pushed = self.push(source, pushed, [is_late, is_due])?;
                }
                _ => {}
            }
            if began.elapsed() > self.limit {
                cancel(source)?;
                let seconds = self.limit.as_secs();
                let why = format!("it had not converged after {seconds} s");
                return Ok((Some(why), pushed.is_forced));
            }
            interrupt::sleep(POLL_EVERY)?;
        }
    }

    /// Asks QEMU to switch over: a move that is late, and a post-copy move that is due for it.
    fn push(
        &self,
        source: &mut PeerQemu,
        pushed: Pushed,
        [is_late, is_due]: [bool; 2],
    ) -> Result<Pushed, LabError> {
        let is_postcopy = self.system.strategy() == "postcopy";
        if pushed.is_asked || !(is_late || is_postcopy && is_due) {
            return Ok(pushed);
        }
        if is_postcopy {
            source.execute("migrate-start-postcopy", &json!({}))?;
        } else {
            let any = json!({"downtime-limit": ANY_DOWNTIME_MS});
            source.execute("migrate-set-parameters", &any)?;
        }
        Ok(Pushed {
            is_asked: true,
            is_forced: !(is_postcopy && is_due),
        })
    }
}

/// Whether QEMU was asked to switch over, and whether that was for the time that had passed.
#[derive(Debug, Clone, Copy, Default)]
struct Pushed {
    is_asked: bool,
    is_forced: bool,
}

/// Returns whether `dirty-sync-count` is the number of passes over memory that were begun. Where
/// post-copy may follow, QEMU 11.1 queries dirty pages, and counts that, ten times a second.
fn counts_passes(version: &Value) -> bool {
    let number = |key: &str| version.get("qemu")?.get(key)?.as_u64();
    number("major").zip(number("minor")) <= Some((10, 0))
}

fn first_pass_is_over(info: &Value, counts_passes: bool) -> bool {
    let ram = |key: &str| info.get("ram")?.get(key)?.as_u64();
    let over = || match counts_passes {
        true => Some(ram("dirty-sync-count")? > 1),
        false => Some((ram("normal")? + ram("duplicate")?) * ram("page-size")? >= ram("total")?),
    };
    over().unwrap_or(false)
}

fn cancel(source: &mut PeerQemu) -> Result<(), LabError> {
    source.execute("migrate_cancel", &json!({}))?;
    let began = Instant::now();
    while began.elapsed() < SETTLE_LIMIT {
        if ["cancelled", "completed", "failed"].contains(&source.migration_status()?.as_str()) {
            return Ok(());
        }
        thread::sleep(POLL_EVERY);
    }
    Err(unexpected("a cancelled migration did not end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_has_what_came_before_it() {
        let new = PeerSystem::MultifdZstdPostcopy;
        for (version, has) in [
            ("7.2.22", false),
            ("10.0.2", false),
            ("10.1.0", true),
            ("11.1.3", true),
        ] {
            assert_eq!(new.is_in(version), has, "{version}");
            assert!(PeerSystem::Postcopy.is_in(version), "{version}");
        }
    }

    #[test]
    fn a_pass_is_over_when_it_was_counted_or_every_page_was_sent() {
        let info = |normal, counted| {
            json!({"status": "active", "ram": {
                "normal": normal, "duplicate": 20, "page-size": 4096, "total": 100 * 4096,
                "dirty-sync-count": counted,
            }})
        };
        for ([major, minor], counts) in [([7, 2], true), ([10, 0], true), ([11, 1], false)] {
            let version = json!({"qemu": {"micro": 2, "minor": minor, "major": major}});
            assert_eq!(counts_passes(&version), counts, "{version}");
            assert!(!first_pass_is_over(&json!({"status": "setup"}), counts));
        }
        assert!(!first_pass_is_over(&info(79, 1), true));
        assert!(first_pass_is_over(&info(79, 2), true));
        assert!(!first_pass_is_over(&info(79, 40), false));
        assert!(first_pass_is_over(&info(80, 40), false));
    }
}
