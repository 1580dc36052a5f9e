//! Computes the checks of `lab bench strategies` from the rows of one run.

use super::super::{counts, judge_own, ratio};
use super::{AUTO, EARLY, STRATEGIES};
use crate::bench::document::{AskedLink, Document, Sense, median};
use crate::moves::MoveRow;
use crate::peer::PeerSystem;

/// The downtime of a move whose pending content follows: round trips, and the rest.
const ROUND_TRIPS: f64 = 1.5;
const ROUND_TRIPS_EARLY: f64 = 0.5;
const ALLOWANCE_MS: f64 = 150.0;
/// The median wait for a page, beyond a round trip.
const FAULT_ALLOWANCE_MS: f64 = 5.0;
/// The downtime relative to that of QEMU's post-copy.
const DOWNTIME_OF_QEMU: f64 = 0.5;
/// The time of `auto` relative to that of the best fixed strategy.
const TIME_OF_BEST: f64 = 1.3;

/// The strategies after whose switchover content is missing, each with the baseline that begins it
/// with as many passes.
const LIKE_WITH_LIKE: [(&str, PeerSystem); 2] = [
    ("hybrid", PeerSystem::Postcopy),
    ("postcopy", PeerSystem::PostcopyAtOnce),
];

/// Computes the checks from the rows: for each link and workload, then over all.
pub(super) fn judge(rows: &[MoveRow], document: &mut Document) {
    let mut cases: Vec<(AskedLink, &str)> = Vec::new();
    for row in rows {
        let case = (row.link, row.workload.as_str());
        if !cases.contains(&case) {
            cases.push(case);
        }
    }
    for (link, workload) in cases {
        let of_case = |row: &&MoveRow| row.link == link && row.workload == workload;
        let judged = Judged {
            rows: rows.iter().filter(of_case).collect(),
            link,
            name: format!("{}_{workload}", name_of(link)),
        };
        for (strategy, peer) in LIKE_WITH_LIKE {
            judged.judge(strategy, peer, document);
        }
        judged.judge_early(document);
        judged.judge_auto(document);
    }
    if rows.iter().any(|row| row.system == "longhaul") {
        judge_own(rows, document);
    }
}

fn name_of(link: AskedLink) -> String {
    let loss = match link.loss {
        none if none <= 0.0 => String::new(),
        some => format!("_{}%", some * 100.0),
    };
    format!("{}mbit_{}ms{loss}", link.rate_bps as f64 / 1e6, link.rtt_ms)
}

/// The rows of one link and workload.
struct Judged<'a> {
    rows: Vec<&'a MoveRow>,
    link: AskedLink,
    name: String,
}

impl<'a> Judged<'a> {
    /// Returns the rows of one of Longhaul's strategies that count; `None` if it was not measured.
    fn of(&self, strategy: &str) -> Option<Vec<&'a MoveRow>> {
        self.counting(|row| row.system == "longhaul" && row.strategy == strategy)
    }

    /// As [`Self::of`], for a baseline.
    fn of_peer(&self, peer: PeerSystem) -> Option<Vec<&'a MoveRow>> {
        self.counting(|row| row.system == peer.name())
    }

    fn counting(&self, is: impl Fn(&MoveRow) -> bool) -> Option<Vec<&'a MoveRow>> {
        let all = || self.rows.iter().copied().filter(|row| is(row));
        all().next()?;
        Some(all().filter(|row| counts(row)).collect())
    }

    /// Judges a strategy after whose switchover content is missing.
    fn judge(&self, strategy: &str, like: PeerSystem, document: &mut Document) {
        let Some(own) = self.of(strategy) else { return };
        let name = format!("{strategy}_{}", self.name);
        let limit_ms = ROUND_TRIPS * self.link.rtt_ms + ALLOWANCE_MS;
        let check = format!("downtime_ms.{name}");
        document.add_check(&check, downtime_ms(&own), Sense::AtMost, limit_ms);
        let medians = own.iter().filter_map(|row| Some(row.faults?.median_ms));
        let check = format!("fault_median_ms.{name}");
        let limit_ms = self.link.rtt_ms + FAULT_ALLOWANCE_MS;
        document.add_check(&check, median(medians), Sense::AtMost, limit_ms);
        if let Some(theirs) = self.of_peer(PeerSystem::Postcopy) {
            let check = format!("downtime_vs_qemu_postcopy.{name}");
            let value = ratio(&own, &theirs, |row| row.downtime_ms);
            document.add_check(&check, value, Sense::AtMost, DOWNTIME_OF_QEMU);
        }
        if let Some(theirs) = self.of_peer(like) {
            let work = |rows: &[&MoveRow]| {
                median(
                    rows.iter()
                        .filter_map(|row| row.work_after_switchover_per_s),
                )
            };
            // A ratio would have no value for a baseline whose guest did nothing.
            let both = work(&own).zip(work(&theirs));
            let check = format!("work_after_switchover_per_s.{name}");
            let limit = both.map_or(0.0, |(_, theirs)| theirs);
            document.add_check(&check, both.map(|(own, _)| own), Sense::AtLeast, limit);
        }
    }

    /// Judges a strategy after whose switchover content is missing, with early release.
    fn judge_early(&self, document: &mut Document) {
        let Some(own) = self.of(EARLY) else { return };
        let limit_ms = ROUND_TRIPS_EARLY * self.link.rtt_ms + ALLOWANCE_MS;
        let check = format!("downtime_ms.{EARLY}_{}", self.name);
        document.add_check(&check, downtime_ms(&own), Sense::AtMost, limit_ms);
    }

    /// Compares `auto` with the strategies that it may choose.
    fn judge_auto(&self, document: &mut Document) {
        let Some(auto) = self.of(AUTO) else { return };
        let fixed = STRATEGIES.iter().filter(|strategy| **strategy != AUTO);
        let fixed: Vec<_> = fixed.filter_map(|strategy| self.of(strategy)).collect();
        let total_ms = |rows: &[&MoveRow]| median(rows.iter().filter_map(|row| row.total_ms));
        let totals = fixed.iter().filter_map(|rows| total_ms(rows));
        let best_ms = totals.min_by(f64::total_cmp);
        let value = total_ms(&auto).zip(best_ms);
        let value = value.map(|(auto_ms, best_ms)| auto_ms / best_ms);
        let check = format!("auto_total_ms_vs_best.{}", self.name);
        document.add_check(&check, value, Sense::AtMost, TIME_OF_BEST);
        let Some(asked_ms) = self.rows.first().map(|row| row.asked_downtime_ms as f64) else {
            return;
        };
        let mut downtimes = fixed.iter().filter_map(|rows| downtime_ms(rows));
        if downtimes.any(|fixed_ms| fixed_ms <= asked_ms) {
            let check = format!("auto_downtime_ms.{}", self.name);
            document.add_check(&check, downtime_ms(&auto), Sense::AtMost, asked_ms);
        }
    }
}

fn downtime_ms(rows: &[&MoveRow]) -> Option<f64> {
    median(rows.iter().filter_map(|row| row.downtime_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moves::Parameters;
    use longhaul_api::FaultReport;

    const NEAR: &str = "100mbit,20ms";
    const FAR: &str = "100mbit,100ms";

    /// A row with a time in seconds, a downtime and the work after the switchover.
    fn row(
        [system, strategy]: [&str; 2],
        link: &str,
        (total_s, downtime_ms, work): (f64, f64, f64),
    ) -> MoveRow {
        let link = link.parse().unwrap();
        let names = [system, strategy, "max_1_4"];
        let mut row = MoveRow::new(names, Parameters::default(), link, 1, 300);
        row.outcome = "completed".to_owned();
        row.total_ms = Some(total_s * 1000.0);
        row.downtime_ms = Some(downtime_ms);
        row.work_after_switchover_per_s = Some(work);
        row.verify_errors = Some(0);
        row.faults = Some(FaultReport {
            pages: 100,
            pages_per_gib: 400.0,
            median_ms: work / 2.0,
            p99_ms: 90.0,
            longest_ms: 95.0,
            above_10_ms: Some(100),
            above_100_ms: Some(0),
            above_1000_ms: Some(0),
        });
        row
    }

    fn ours(strategy: &str, figures: (f64, f64, f64)) -> MoveRow {
        row(["longhaul", strategy], NEAR, figures)
    }

    fn theirs(peer: PeerSystem, figures: (f64, f64, f64)) -> MoveRow {
        row([peer.name(), peer.strategy()], NEAR, figures)
    }

    /// A check's value, its limit, and whether it holds.
    type Found = (Option<f64>, f64, bool);

    fn judged(rows: &[MoveRow]) -> Vec<(String, Found)> {
        let mut document = Document::new("strategies");
        judge(rows, &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let check = |check: &serde_json::Value| {
            let holds = check["holds"].as_bool().unwrap();
            let limit = check["limit"].as_f64().unwrap();
            let name = check["name"].as_str().unwrap().to_owned();
            (name, (check["value"].as_f64(), limit, holds))
        };
        let checks = value["checks"].as_array().unwrap().iter();
        checks.map(check).collect()
    }

    fn of(checks: &[(String, Found)], name: &str) -> Found {
        let found = checks.iter().find(|check| check.0 == name);
        found.unwrap_or_else(|| panic!("no {name} in {checks:?}")).1
    }

    #[test]
    fn the_bars_are_computed_from_medians_of_rows_that_count() {
        let mut damaged = theirs(PeerSystem::Postcopy, (20.0, 1.0, 9999.0));
        damaged.verify_errors = Some(2);
        let mut forced = theirs(PeerSystem::Postcopy, (90.0, 1.0, 9999.0));
        forced.outcome = "forced".to_owned();
        let rows = [
            ours("precopy", (12.0, 2500.0, 100.0)),
            ours("hybrid", (9.0, 100.0, 80.0)),
            ours("hybrid", (9.0, 170.0, 90.0)),
            ours("hybrid", (9.0, 900.0, 70.0)),
            ours("postcopy", (8.0, 240.0, 45.0)),
            theirs(PeerSystem::Postcopy, (20.0, 400.0, 50.0)),
            damaged,
            forced,
            theirs(PeerSystem::PostcopyAtOnce, (15.0, 600.0, 60.0)),
            row(["longhaul", "hybrid"], FAR, (9.0, 240.0, 70.0)),
            row(["longhaul", EARLY], FAR, (9.0, 190.0, 70.0)),
        ];
        let checks = judged(&rows);
        let hybrid = of(&checks, "downtime_ms.hybrid_100mbit_20ms_max_1_4");
        assert_eq!(hybrid, (Some(170.0), 180.0, true));
        let postcopy = of(&checks, "downtime_ms.postcopy_100mbit_20ms_max_1_4");
        assert_eq!(postcopy, (Some(240.0), 180.0, false));
        let far = of(&checks, "downtime_ms.hybrid_100mbit_100ms_max_1_4");
        assert_eq!(far, (Some(240.0), 300.0, true));
        let early = of(&checks, "downtime_ms.hybrid-early_100mbit_100ms_max_1_4");
        assert_eq!(early, (Some(190.0), 200.0, true));
        let name = "downtime_vs_qemu_postcopy.hybrid_100mbit_20ms_max_1_4";
        assert_eq!(of(&checks, name), (Some(0.425), 0.5, true));
        let name = "downtime_vs_qemu_postcopy.postcopy_100mbit_20ms_max_1_4";
        assert_eq!(of(&checks, name), (Some(0.6), 0.5, false));
        let name = "work_after_switchover_per_s.hybrid_100mbit_20ms_max_1_4";
        assert_eq!(of(&checks, name), (Some(80.0), 50.0, true));
        let name = "work_after_switchover_per_s.postcopy_100mbit_20ms_max_1_4";
        assert_eq!(of(&checks, name), (Some(45.0), 60.0, false));
        let faults = of(&checks, "fault_median_ms.hybrid_100mbit_20ms_max_1_4");
        assert_eq!(faults, (Some(40.0), 25.0, false));
        let faults = of(&checks, "fault_median_ms.hybrid_100mbit_100ms_max_1_4");
        assert_eq!(faults, (Some(35.0), 105.0, true));
        assert!(of(&checks, "not_completed.longhaul").2);
        // Without a baseline over the far link nothing is compared there, and without `auto` it is
        // not judged.
        assert_eq!(checks.len(), 13);
    }

    #[test]
    fn auto_is_held_against_the_best_strategy_and_the_downtime_that_one_of_them_reaches() {
        let name = "auto_total_ms_vs_best.100mbit_20ms_max_1_4";
        let mut rows = vec![
            ours("precopy", (10.0, 2500.0, 100.0)),
            ours("hybrid", (16.0, 150.0, 80.0)),
            ours("auto", (12.0, 310.0, 80.0)),
        ];
        let checks = judged(&rows);
        assert_eq!(of(&checks, name), (Some(1.2), 1.3, true));
        let downtime = of(&checks, "auto_downtime_ms.100mbit_20ms_max_1_4");
        assert_eq!(downtime, (Some(310.0), 300.0, false));
        // No strategy reaches it: then nothing is asked of `auto`.
        rows[1].downtime_ms = Some(301.0);
        rows[2].total_ms = Some(13_100.0);
        let checks = judged(&rows);
        assert!(!of(&checks, name).2);
        assert!(!checks.iter().any(|check| check.0.starts_with("auto_down")));
        // A move that failed is no best strategy, and an `auto` that failed does not hold.
        rows[0].outcome = "failed: it broke".to_owned();
        rows[2].outcome = "failed: it broke".to_owned();
        let checks = judged(&rows);
        assert_eq!(of(&checks, name), (None, 1.3, false));
    }

    #[test]
    fn what_went_wrong_is_never_passed_over() {
        let mut failed = ours("hybrid", (9.0, 100.0, 80.0));
        failed.outcome = "failed: it broke".to_owned();
        failed.verify_errors = None;
        failed.faults = None;
        let checks = judged(&[failed, theirs(PeerSystem::Postcopy, (20.0, 400.0, 50.0))]);
        assert!(checks.iter().all(|check| !check.1.2), "{checks:?}");
        assert_eq!(checks.len(), 6);
        // Baselines alone are not judged.
        assert!(judged(&[theirs(PeerSystem::Default, (99.0, 9000.0, 50.0))]).is_empty());
    }
}
