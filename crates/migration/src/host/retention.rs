//! Which versions of a replica are kept: as the API says it, and as a replica has it.

use longhaul_parcel::Retention;

/// Returns what the API says.
pub(crate) fn shown(keep: Retention) -> longhaul_api::Retention {
    longhaul_api::Retention {
        last: keep.last,
        hourly: keep.hourly,
        daily: keep.daily,
        weekly: keep.weekly,
    }
}

/// Returns what a replica has.
pub(crate) fn asked(keep: longhaul_api::Retention) -> Retention {
    Retention {
        last: keep.last,
        hourly: keep.hourly,
        daily: keep.daily,
        weekly: keep.weekly,
    }
}
