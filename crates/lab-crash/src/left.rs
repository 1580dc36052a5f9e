//! Ensures that blocks of the guest's disk, or memory, are missing when the guest runs at the
//! destination, and that they arrive slowly enough for the guest to access them.
//!
//! An agent is held on the way, by a file of its own, until that is so.

use super::case::{Case, Disks, Memory, Release, Victim};
use super::ground::{Ground, LIMIT, LINK};
use super::point::{Side, Step};
use longhaul_api::Phase;
use longhaul_lab::error::LabError;
use longhaul_lab::interrupt;
use longhaul_lab::process::wait_until;
use std::path::PathBuf;

/// The rate of missing blocks while the guest must access them.
const SLOW: &str = "2mbit";

/// The link while memory must be missing.
const NARROW: &str = "4mbit,4ms";
/// The link while the little memory that pre-copy has left must be missing.
const NARROWEST: &str = "1mbit,4ms";

/// The condition before blocks are missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// The guest writes to one place so often that it is left to the end.
    Hot,
    /// Missing blocks arrive slowly.
    Slow,
    /// So does everything.
    Narrow,
    /// So does all memory that follows the device state, until the page server is killed.
    Loading(&'static str),
}

fn need(case: &Case) -> Option<Need> {
    match case.kind.disks {
        _ if case.kind.victim == Victim::PageServer => {
            // Memory follows behind these.
            let before = ["list", "complete"].contains(&case.point.what())
                || case.kind.release == Release::Early;
            let link = match case.kind.memory {
                Memory::Postcopy => NARROW,
                Memory::Precopy | Memory::Hybrid => NARROWEST,
            };
            (!before).then_some(Need::Loading(link))
        }
        _ if case.kind.step != Step::Pulling => None,
        _ if case.kind.memory.follows() => Some(Need::Narrow),
        Disks::Hybrid => Some(Need::Hot),
        _ if case.point.needs_the_guest() => Some(Need::Slow),
        _ => None,
    }
}

/// Returns whether missing blocks must arrive slowly.
pub(super) fn comes_slowly(case: &Case) -> bool {
    need(case) == Some(Need::Slow)
}

/// Returns the file by which an agent reports that it is held for this.
pub(super) fn marker(ground: &Ground) -> Result<PathBuf, LabError> {
    Ok(ground.lab.shared_folder()?.join("held-for-what-is-left"))
}

/// Returns the fail points of a side's agent for this.
pub(super) fn arm(case: &Case, side: Side, ground: &Ground) -> Result<Option<String>, LabError> {
    let point = match (need(case), side) {
        // The guest runs at the source, and blocks arrive.
        (Some(Need::Hot), Side::Destination) => "destination:before-send:accepted",
        // It is stopped, and nothing of its missing memory has been sent.
        (Some(Need::Narrow), Side::Destination) => "destination:after-receipt:complete",
        // It is stopped, and its device state has been sent.
        (Some(Need::Loading(_)), Side::Source) => "source:before-send:complete",
        // It runs at the destination, and no missing block has arrived.
        (Some(Need::Slow), Side::Source) => "source:after-receipt:missing",
        _ => return Ok(None),
    };
    Ok(Some(format!("{point}=hold:{}", marker(ground)?.display())))
}

/// Waits until blocks are missing, or arrive slowly.
pub(super) fn lead_up(case: &Case, ground: &Ground, source: usize) -> Result<(), LabError> {
    let Some(need) = need(case) else {
        return Ok(());
    };
    let marker = marker(ground)?;
    let held = wait_until(LIMIT, || marker.exists() || interrupt::check().is_err());
    interrupt::check()?;
    if !held {
        return Err(LabError::Which(format!(
            "the move does not come to where {need:?} is seen to"
        )));
    }
    match need {
        Need::Hot => {
            let mut watched = false;
            wait_until(LIMIT, || {
                let latest = ground.product.latest_migration(source, &ground.guest);
                watched = matches!(latest, Ok(Some(moving)) if moving.phase == Phase::Precopy);
                watched
            });
            if !watched {
                return Err(LabError::Which("the guest's writes are not watched".into()));
            }
            ground.disk.wait_for_a_hot_place(LIMIT)?;
        }
        Need::Slow => limit(ground, source, SLOW)?,
        Need::Narrow => ground.set_link(NARROW)?,
        Need::Loading(link) => ground.set_link(link)?,
    }
    super::run::remove(&marker)
}

/// Lets missing blocks arrive as fast as they can.
pub(super) fn mend(case: &Case, ground: &Ground, source: usize) -> Result<(), LabError> {
    match need(case) {
        Some(Need::Slow) => {
            // The move may be over, and a restarted agent has no limit.
            let _ = limit(ground, source, "none");
            Ok(())
        }
        Some(Need::Narrow | Need::Loading(_)) => ground.set_link(LINK),
        Some(Need::Hot) | None => Ok(()),
    }
}

fn limit(ground: &Ground, source: usize, rate: &str) -> Result<(), LabError> {
    let agent = ground.product.agent(source)?;
    agent.run(&["limit", &ground.guest, rate]).map(drop)
}
