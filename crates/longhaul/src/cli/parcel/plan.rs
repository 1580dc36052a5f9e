//! Compares the ways of disks, for an operator's figures.

use super::{now_s, source};
use crate::cli::args::{Changes, ComparedArgs};
use crate::cli::error::CliError;
use crate::cli::output::Output;
use crate::cli::show::parcel as shown;
use longhaul_migration::host::config::Config;
use longhaul_parcel::Date;
use longhaul_parcel::plan::{Comparison, Figures, Way};
use serde::Serialize;

/// What one way takes.
#[derive(Debug, Serialize)]
pub(crate) struct WayDocument {
    pub(crate) way: &'static str,
    /// When the devices leave.
    pub(crate) leaves: Option<Date>,
    /// When the disks are imported.
    pub(crate) imported: Option<Date>,
    /// When everything is there; `None` if the disks change faster than the link carries.
    pub(crate) done: Option<Date>,
    pub(crate) done_s: Option<u64>,
    pub(crate) link_bytes: Option<u64>,
    pub(crate) cost: Option<f64>,
    /// The rate of the link above which the link alone is done earlier.
    pub(crate) loses_above_bps: Option<u64>,
}

/// The comparison.
#[derive(Debug, Serialize)]
pub(crate) struct PlanDocument {
    pub(crate) bytes: u64,
    pub(crate) guests: u64,
    pub(crate) rate_bps: u64,
    pub(crate) changed_bytes_per_day: u64,
    pub(crate) courier_days: f64,
    pub(crate) device_bytes_per_s: u64,
    pub(crate) disk_bytes_per_s: u64,
    pub(crate) ways: [WayDocument; 3],
    /// The number of such guests from which on the parcel is done earlier.
    pub(crate) guests_from: Option<u64>,
}

/// Returns the comparison. `now` is in seconds since 1970.
pub(crate) fn compare((bytes, guests): (u64, u64), args: &ComparedArgs, now: u64) -> PlanDocument {
    let changed = match args.changed_per_day {
        Changes::Bytes(bytes) => bytes as f64,
        Changes::Part(part) => part * bytes as f64,
    };
    let figures = Figures {
        bytes: bytes as f64,
        guests,
        link_bps: args.rate as f64,
        changed_per_day: changed,
        leaves_days: args.leaves_in,
        courier_days: args.courier_days,
        courier_cost: args.courier_cost,
        link_cost_per_gb: args.link_cost_per_gb,
        device_rate: args.device_rate as f64,
        disk_rate: args.disk_rate as f64,
    };
    let Comparison {
        link,
        parcel,
        topped_up,
        guests_from,
    } = figures.compare();
    let day = |s: f64| Date::of(now.saturating_add(s as u64));
    let document = |way, it: Way, is_parcel: bool| WayDocument {
        way,
        leaves: is_parcel.then(|| day(it.leaves_s)),
        imported: is_parcel.then(|| day(it.imported_s)),
        done: it.done_s.map(day),
        done_s: it.done_s.map(|s| s as u64),
        link_bytes: it.link_bytes.map(|bytes| bytes as u64),
        cost: it.cost,
        loses_above_bps: it.loses_above_bps.map(|rate| rate as u64),
    };
    PlanDocument {
        bytes,
        guests,
        rate_bps: args.rate,
        changed_bytes_per_day: changed as u64,
        courier_days: args.courier_days,
        device_bytes_per_s: args.device_rate,
        disk_bytes_per_s: args.disk_rate,
        ways: [
            document("link", link, false),
            document("parcel", parcel, true),
            document("topped_up", topped_up, true),
        ],
        guests_from,
    }
}

/// Shows the comparison.
pub(super) fn plan(
    output: &Output,
    config: impl FnOnce() -> Result<Config, longhaul_migration::host::start_error::StartError>,
    args: &ComparedArgs,
) -> Result<u8, CliError> {
    let content = match (&args.name, args.bytes) {
        (Some(name), _) => source::allocated(&config()?, name)?,
        (None, Some(bytes)) => (bytes, args.guests),
        (None, None) => {
            let hint = "longhaul parcel plan NAME, or longhaul parcel plan --bytes 20TiB";
            return Err(CliError::usage(
                "nothing says how much is to be moved",
                hint,
            ));
        }
    };
    let document = compare(content, args, now_s());
    super::super::show(output, &document, || shown::planned(&document))?;
    Ok(0)
}
