//! Which versions of a replica are kept.

use super::document::ReplicaVersion;
use serde::{Deserialize, Serialize};

const HOUR_S: u64 = 3600;
const DAY_S: u64 = 24 * HOUR_S;
const WEEK_S: u64 = 7 * DAY_S;
/// 1970 began with a Thursday. Weeks begin with Mondays.
const MONDAY_S: u64 = 3 * DAY_S;

/// Returns the number of the period that a version is in.
type PeriodOf = fn(&ReplicaVersion) -> u64;

/// How many versions are kept: the last ones, and for some hours, days and weeks that have
/// versions, the last one of each. Times are in UTC. A version may be kept for several reasons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Last versions, at least one.
    pub last: u32,
    /// Hours.
    pub hourly: u32,
    /// Days.
    pub daily: u32,
    /// Weeks.
    pub weekly: u32,
}

impl Retention {
    /// Keeps the last versions.
    pub fn last(last: u32) -> Self {
        Self {
            last,
            hourly: 0,
            daily: 0,
            weekly: 0,
        }
    }

    /// Returns the same with at most so many for each reason, and at least the last one.
    #[must_use]
    pub fn limited(self, most: u32) -> Self {
        Self {
            last: self.last.min(most).max(1),
            hourly: self.hourly.min(most),
            daily: self.daily.min(most),
            weekly: self.weekly.min(most),
        }
    }

    /// Returns for each version whether it is kept. The newest one always is. Others that are of no
    /// moment are not.
    pub(super) fn keeps(&self, versions: &[ReplicaVersion]) -> Vec<bool> {
        let newest = versions.len().saturating_sub(1);
        let mut keeps: Vec<bool> = (0..versions.len()).map(|at| at == newest).collect();
        let reasons: [(u32, PeriodOf); 4] = [
            (self.last, |version| version.version),
            (self.hourly, |version| version.time / HOUR_S),
            (self.daily, |version| version.time / DAY_S),
            (self.weekly, |version| {
                version.time.saturating_add(MONDAY_S) / WEEK_S
            }),
        ];
        for (most, period_of) in reasons {
            let (mut kept, mut last) = (0, None);
            for (version, keeps) in versions.iter().zip(&mut keeps).rev() {
                let period = period_of(version);
                if kept < most && version.consistent && last != Some(period) {
                    (kept, last) = (kept + 1, Some(period));
                    *keeps = true;
                }
            }
        }
        keeps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn versions(times: &[u64]) -> Vec<ReplicaVersion> {
        let each = (1..).zip(times).map(|(version, time)| ReplicaVersion {
            version,
            time: *time,
            consistent: version % 10 != 0,
            frozen: false,
            disks: Vec::new(),
        });
        each.collect()
    }

    fn kept(retention: Retention, times: &[u64]) -> Vec<u64> {
        let versions = versions(times);
        let keeps = retention.keeps(&versions).into_iter().zip(versions);
        keeps
            .filter(|(keeps, _)| *keeps)
            .map(|(_, version)| version.version)
            .collect()
    }

    #[test]
    fn the_last_one_of_each_period_is_kept() {
        // Every 20 minutes from Monday, 2026-11-23, 00:00 UTC, for nine days.
        let monday = 1_795_392_000;
        let times: Vec<u64> = (0..9 * 72).map(|at| monday + at * 1200).collect();
        assert_eq!(kept(Retention::last(3), &times), [646, 647, 648]);
        let hourly = Retention {
            hourly: 3,
            ..Retention::last(1)
        };
        assert_eq!(kept(hourly, &times), [642, 645, 648]);
        let all = Retention {
            last: 2,
            hourly: 2,
            daily: 3,
            weekly: 4,
        };
        // Sunday ends with number 504; Monday, Tuesday; then hours, and the last ones.
        assert_eq!(kept(all, &times), [504, 576, 645, 647, 648]);
        // One of no moment is no reason, and is kept only while it is the newest.
        assert_eq!(kept(Retention::last(2), &times[..640]), [638, 639, 640]);
        assert_eq!(kept(Retention::last(2), &times[..641]), [639, 641]);
        assert!(kept(Retention::last(2), &[]).is_empty());
        let none = all.limited(0);
        assert_eq!(none, Retention::last(1).limited(9));
    }
}
