//! Measures guests with a whole system on a disk, under workloads of real programs.

use super::super::Options;
use super::super::document::{Document, Sense, median};
use super::{ASKED_DOWNTIME_MS, Asked, Movers, System, counts, judge_own, ratio};
use crate::moves::{Case, Load, MoveRow};
use crate::peer::PeerSystem;
use crate::warm::SystemGuest;
use longhaul_lab::error::LabError;
use longhaul_lab::lab::say;
use longhaul_lab::link::spec::LinkSpec;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// The workloads of the checks.
const WORKLOADS: [&str; 2] = ["compile", "database"];
const QUICK_WORKLOADS: [&str; 1] = ["compile"];
/// The time limit of a move that does not converge.
const LIMIT: Duration = Duration::from_secs(240);

const BYTES_OF_DEFAULT: f64 = 0.25;
const BYTES_OF_MULTIFD: f64 = 0.8;
const BYTES_OF_MULTIFD_DATABASE: f64 = 0.75;
/// The bytes of memory where the disk moves too, relative to those without knowledge of the disk's
/// blocks.
const BYTES_WITH_DISK: f64 = 0.6;
const SAVED_BY_INDEX: f64 = 0.4;
const TIME_OF_BEST: f64 = 0.85;
/// From this link rate on time is judged, and bytes are not.
const FAST_LINK_BPS: u64 = 500_000_000;

/// Runs the bench, adding rows and then checks to the document.
pub(super) fn measure(
    asked: &Asked<'_>,
    guest: &SystemGuest,
    systems: &[System],
    movers: &Movers<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let mut warm = Vec::new();
    for workload in workloads(asked.options, guest) {
        warm.push(Rc::new(guest.warm(
            &workload,
            &asked.machine,
            movers.launcher,
        )?));
    }
    let mut rows = Vec::new();
    // Each of Longhaul's guests has a disk of its own.
    let mut images = movers.launcher.disks.iter();
    let mut local = movers.of_host.disks.iter();
    for repeat in 1..=asked.options.repeats() {
        for warm in &warm {
            for system in systems {
                // A guest that was moved away cannot be started again under its name.
                let name = format!("bench-{}", rows.len() + 1);
                let mut description = guest.description(&name, &asked.machine, &warm.workload);
                let image = match system {
                    System::Longhaul => images.next(),
                    System::WithDisk { .. } => local.next(),
                    System::Strategy(_) | System::Peer(_) => None,
                };
                if let Some((image, _)) = image {
                    for disk in &mut description.disks {
                        disk.image.clone_from(image);
                    }
                }
                let case = Case {
                    guest: description,
                    load: Load::Warm(warm.clone()),
                    link: asked.link,
                    downtime_ms: ASKED_DOWNTIME_MS,
                    limit: LIMIT,
                    force_after: None,
                    observe: Duration::ZERO,
                    repeat,
                };
                rows.push(movers.add_row(&case, *system, document)?);
            }
        }
    }
    if systems
        .iter()
        .any(|system| !matches!(system, System::Peer(_)))
    {
        judge(&rows, systems, asked.link, document);
    }
    Ok(())
}

/// Returns the selected guest with a whole system, if there is one.
pub(super) fn guest(options: &Options) -> Result<Option<SystemGuest>, LabError> {
    match options.guest.as_str() {
        "tiny" => Ok(None),
        "debian" => SystemGuest::debian().map(Some),
        path if path.ends_with(".toml") => SystemGuest::described(Path::new(path)).map(Some),
        other => Err(LabError::Which(format!(
            "there is no guest `{other}`: tiny, debian, or a FILE.toml that describes one"
        ))),
    }
}

/// Returns the selected workloads, or else those of the checks that the guest has, or else all.
pub(super) fn workloads(options: &Options, guest: &SystemGuest) -> Vec<String> {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    if !options.workload.is_empty() {
        return options.workload.clone();
    }
    let usual: &[&str] = match options.quick {
        true => &QUICK_WORKLOADS,
        false => &WORKLOADS,
    };
    let has: Vec<&str> = guest.workloads().collect();
    match usual.iter().all(|name| has.contains(name)) {
        true => names(usual),
        false => names(&has),
    }
}

/// Computes the checks from the rows.
fn judge(rows: &[MoveRow], systems: &[System], link: LinkSpec, document: &mut Document) {
    let mut workloads: Vec<&str> = Vec::new();
    for row in rows {
        if !workloads.contains(&row.workload.as_str()) {
            workloads.push(&row.workload);
        }
    }
    for workload in workloads {
        Judged {
            rows,
            systems,
            workload,
        }
        .judge(link.rate_bps >= FAST_LINK_BPS, document);
    }
    judge_own(rows, document);
}

/// The rows of one workload.
struct Judged<'a> {
    rows: &'a [MoveRow],
    systems: &'a [System],
    workload: &'a str,
}

impl Judged<'_> {
    fn judge(&self, fast_link: bool, document: &mut Document) {
        self.judge_with_disk(document);
        if self.systems.contains(&System::Longhaul) {
            self.judge_memory(fast_link, document);
        }
    }

    /// Judges what a moved disk saves of memory's bytes.
    fn judge_with_disk(&self, document: &mut Document) {
        let workload = self.workload;
        let [on, off] = System::WITH_DISK;
        let rows = |system: System| {
            self.systems
                .contains(&system)
                .then(|| self.of(system.name()))
        };
        let Some(with) = rows(on) else { return };
        if let Some(without) = rows(off) {
            let middle = |rows: &[&MoveRow], value: fn(&MoveRow) -> Option<f64>| {
                median(rows.iter().filter_map(|row| value(row)))
            };
            let saved = || {
                let saved = middle(&without, bytes)? - middle(&with, bytes)?;
                Some(saved / middle(&without, bytes_of_memory)?)
            };
            let name = format!("saved_by_shared_index.{workload}");
            document.add_check(&name, saved(), Sense::AtLeast, SAVED_BY_INDEX);
        }
        if let Some(multifd) = self.peer(PeerSystem::MultifdZstd) {
            let name = format!("memory_bytes_with_disk_vs_multifd_zstd.{workload}");
            let value = ratio(&with, &multifd, bytes_of_memory);
            document.add_check(&name, value, Sense::AtMost, BYTES_WITH_DISK);
        }
    }

    fn judge_memory(&self, fast_link: bool, document: &mut Document) {
        let workload = self.workload;
        let own = self.of("longhaul");
        if let Some(default) = self.peer(PeerSystem::Default) {
            if fast_link {
                let name = format!("total_ms_vs_qemu_default.{workload}");
                let value = ratio(&own, &default, |row| row.total_ms);
                document.add_check(&name, value, Sense::AtMost, 1.0);
            } else {
                let name = format!("bytes_vs_qemu_default.{workload}");
                let value = ratio(&own, &default, bytes);
                document.add_check(&name, value, Sense::AtMost, BYTES_OF_DEFAULT);
            }
            let middle = |rows: &[&MoveRow]| median(rows.iter().filter_map(|row| row.downtime_ms));
            let limit_ms = middle(&default)
                .unwrap_or(0.0)
                .max(ASKED_DOWNTIME_MS as f64);
            let name = format!("downtime_ms.{workload}");
            document.add_check(&name, middle(&own), Sense::AtMost, limit_ms);
        }
        if fast_link {
            return;
        }
        if let Some(multifd) = self.peer(PeerSystem::MultifdZstd) {
            let limit = match workload {
                "database" => BYTES_OF_MULTIFD_DATABASE,
                _ => BYTES_OF_MULTIFD,
            };
            let name = format!("bytes_vs_multifd_zstd.{workload}");
            document.add_check(&name, ratio(&own, &multifd, bytes), Sense::AtMost, limit);
            let name = format!("work_vs_multifd_zstd.{workload}");
            self.judge_work(&name, &own, &multifd, document);
        }
        let is_precopy = |system: &System| match system {
            System::Peer(peer) => peer.strategy() == "precopy",
            System::Longhaul | System::WithDisk { .. } | System::Strategy(_) => false,
        };
        if self.systems.iter().any(is_precopy) {
            let name = format!("total_ms_vs_best_precopy.{workload}");
            let own_ms = median(own.iter().filter_map(|row| row.total_ms));
            let value = own_ms.zip(self.best_precopy_ms());
            let value = value.map(|(own_ms, best_ms)| own_ms / best_ms);
            document.add_check(&name, value, Sense::AtMost, TIME_OF_BEST);
        }
    }

    fn of(&self, system: &str) -> Vec<&MoveRow> {
        let of_workload = self.rows.iter().filter(|row| row.workload == self.workload);
        of_workload
            .filter(|row| row.system == system && counts(row))
            .collect()
    }

    /// Returns a baseline's rows that count, where the baseline was run.
    fn peer(&self, peer: PeerSystem) -> Option<Vec<&MoveRow>> {
        let asked = self.systems.contains(&System::Peer(peer));
        asked.then(|| self.of(peer.name()))
    }

    /// Returns the shortest median time of QEMU's pre-copy variants.
    fn best_precopy_ms(&self) -> Option<f64> {
        let precopy = PeerSystem::ALL
            .into_iter()
            .filter(|peer| peer.strategy() == "precopy");
        precopy
            .filter_map(|peer| median(self.of(peer.name()).iter().filter_map(|row| row.total_ms)))
            .min_by(f64::total_cmp)
    }

    /// Judges whether the guest got less done than under a baseline, as far as pairs of moves show.
    fn judge_work(&self, name: &str, own: &[&MoveRow], peer: &[&MoveRow], document: &mut Document) {
        let ratios: Vec<f64> = own
            .iter()
            .filter_map(|row| {
                let beside = peer.iter().find(|peer| peer.repeat == row.repeat)?;
                Some(row.work_during_per_s? / beside.work_during_per_s?)
            })
            .collect();
        if self.rows.iter().all(|row| row.repeat == 1) {
            return say(&format!("{name} is not judged: that takes two repeats"));
        }
        let interval = interval(&ratios);
        document.add_check(name, interval.map(|[_, high]| high), Sense::AtLeast, 1.0);
        if let Some(interval) = interval {
            document.add_interval(interval);
        }
    }
}

fn bytes(row: &MoveRow) -> Option<f64> {
    row.link_bytes.map(|bytes| bytes as f64)
}

/// Returns memory's bytes on the link: all of them, or where a disk moved too, memory's part.
fn bytes_of_memory(row: &MoveRow) -> Option<f64> {
    let Some(disk) = row.disk_bytes.filter(|bytes| *bytes > 0) else {
        return bytes(row);
    };
    let memory = row.memory_bytes? as f64;
    Some(bytes(row)? * memory / (memory + disk as f64))
}

/// Returns the 95 % confidence interval of the true ratio: Student's interval of the ratios'
/// logarithms.
fn interval(ratios: &[f64]) -> Option<[f64; 2]> {
    /// For 2, 3, ... ratios.
    const STUDENT: [f64; 9] = [
        12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262,
    ];
    const MANY: f64 = 2.228;
    let logs: Vec<f64> = ratios.iter().map(|ratio| ratio.ln()).collect();
    if logs.len() < 2 || logs.iter().any(|log| !log.is_finite()) {
        return None;
    }
    let count = logs.len() as f64;
    let mean = logs.iter().sum::<f64>() / count;
    let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
    let error = (squares / (count - 1.0) / count).sqrt();
    let reach = error * STUDENT.get(logs.len() - 2).copied().unwrap_or(MANY);
    Some([(mean - reach).exp(), (mean + reach).exp()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use longhaul_lab::arena::Workload;
    use longhaul_lab::guest::Tiny;

    const SYSTEMS: [System; 4] = [
        System::Longhaul,
        System::Peer(PeerSystem::MultifdZstd),
        System::Peer(PeerSystem::Default),
        System::Peer(PeerSystem::Postcopy),
    ];

    fn row(system: &str, repeat: u32, megabytes: u64, seconds: u64, work: f64) -> MoveRow {
        let arena = Workload {
            content: "mix".to_owned(),
            arena_bytes: 0,
            working_set_bytes: 0,
            pages_per_s: 0,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed: 1,
        };
        let case = Case {
            guest: Tiny::new("g").description(),
            load: Load::Arena {
                arena,
                name: "database".to_owned(),
                dirty_share: None,
            },
            link: "100mbit,20ms".parse().unwrap(),
            downtime_ms: ASKED_DOWNTIME_MS,
            limit: LIMIT,
            force_after: None,
            observe: Duration::ZERO,
            repeat,
        };
        let mut row = MoveRow::of(&case, system, "precopy");
        row.outcome = "completed".to_owned();
        row.link_bytes = Some(megabytes * 1_000_000);
        row.total_ms = Some(seconds as f64 * 1000.0);
        row.downtime_ms = Some(if system == "qemu-default" {
            400.0
        } else {
            200.0
        });
        row.work_during_per_s = Some(work);
        row.verify_errors = Some(0);
        row
    }

    fn rows() -> Vec<MoveRow> {
        let mut rows = Vec::new();
        for repeat in 1..=3 {
            let noise = f64::from(repeat);
            rows.push(row("longhaul", repeat, 20, 10, 50.0 + noise));
            rows.push(row("qemu-multifd-zstd", repeat, 40, 20, 50.0));
            rows.push(row("qemu-default", repeat, 100, 50, 60.0));
            // Fast, but not pre-copy.
            rows.push(row("qemu-postcopy", repeat, 100, 5, 10.0));
        }
        rows
    }

    fn judged(rows: &[MoveRow], systems: &[System], link: &str) -> serde_json::Value {
        let mut document = Document::new("memory");
        judge(rows, systems, link.parse().unwrap(), &mut document);
        serde_json::to_value(&document).unwrap()["checks"].take()
    }

    fn check(checks: &serde_json::Value, name: &str) -> serde_json::Value {
        let mut list = checks.as_array().unwrap().iter();
        let found = list.find(|check| check["name"] == name);
        found
            .unwrap_or_else(|| panic!("no {name} in {checks}"))
            .clone()
    }

    #[test]
    fn each_bar_is_computed_from_its_peer() {
        let checks = judged(&rows(), &SYSTEMS, "100mbit,20ms");
        for (name, value, limit) in [
            ("bytes_vs_qemu_default.database", 0.2, 0.25),
            ("bytes_vs_multifd_zstd.database", 0.5, 0.75),
            ("total_ms_vs_best_precopy.database", 0.5, 0.85),
            ("downtime_ms.database", 200.0, 400.0),
        ] {
            let check = check(&checks, name);
            assert_eq!(check["value"], value, "{name}");
            assert_eq!(check["limit"], limit, "{name}");
            assert_eq!(check["holds"], true, "{name}");
        }
        let work = check(&checks, "work_vs_multifd_zstd.database");
        assert_eq!(work["holds"], true);
        assert_eq!(work["interval"][1], work["value"]);
        assert!(work["interval"][0].as_f64().unwrap() < 1.04);
    }

    #[test]
    fn what_a_disk_spares_memory_is_judged_beside_the_disk() {
        let with_disk = |system: System, megabytes: u64, memory: u64| {
            let mut row = row(system.name(), 1, megabytes, 10, 1.0);
            row.memory_bytes = Some(memory * 1_000_000);
            row.disk_bytes = Some(30_000_000);
            row
        };
        let [on, off] = System::WITH_DISK;
        let rows = [
            with_disk(on, 40, 10),
            with_disk(off, 60, 30),
            row("qemu-multifd-zstd", 1, 50, 10, 1.0),
        ];
        let systems = [on, off, System::Peer(PeerSystem::MultifdZstd)];
        let checks = judged(&rows, &systems, "100mbit,20ms");
        let saved = check(&checks, "saved_by_shared_index.database");
        assert_eq!(saved["value"].as_f64(), Some(20.0 / 30.0));
        let memory = check(&checks, "memory_bytes_with_disk_vs_multifd_zstd.database");
        assert_eq!(memory["value"].as_f64(), Some(0.2));
        assert_eq!(checks.as_array().map(Vec::len), Some(4), "{checks}");
    }

    #[test]
    fn a_fast_link_is_judged_by_time() {
        let checks = judged(&rows(), &SYSTEMS, "1gbit,5ms");
        let time = check(&checks, "total_ms_vs_qemu_default.database");
        assert_eq!((&time["value"], &time["limit"]), (&0.2.into(), &1.0.into()));
        let names: Vec<&str> = checks
            .as_array()
            .unwrap()
            .iter()
            .filter_map(|check| check["name"].as_str())
            .collect();
        assert_eq!(names.len(), 4, "{names:?}");
    }

    #[test]
    fn who_does_not_finish_or_is_damaged_is_not_compared_with() {
        let mut some = rows();
        for row in &mut some {
            match row.system.as_str() {
                "qemu-default" => row.outcome = "failed: it had not converged".to_owned(),
                "qemu-multifd-zstd" if row.repeat > 1 => row.verify_errors = Some(3),
                _ => {}
            }
        }
        let checks = judged(&some, &SYSTEMS, "100mbit,20ms");
        let bytes = check(&checks, "bytes_vs_qemu_default.database");
        assert_eq!(
            (&bytes["value"], &bytes["holds"]),
            (&serde_json::Value::Null, &false.into())
        );
        assert_eq!(
            check(&checks, "total_ms_vs_best_precopy.database")["value"],
            0.5
        );
        let work = check(&checks, "work_vs_multifd_zstd.database");
        assert_eq!(work["holds"], false, "one pair tells nothing");
        let mut once = some.clone();
        once.retain(|row| row.repeat == 1);
        let checks = judged(&once, &SYSTEMS, "100mbit,20ms");
        assert_eq!(checks.as_array().unwrap().len(), 6, "{checks}");
        // A system that did not run is not judged against.
        let own = judged(&some, &SYSTEMS[..1], "100mbit,20ms");
        assert_eq!(own.as_array().unwrap().len(), 2, "{own}");
    }

    #[test]
    fn an_interval_is_as_wide_as_pairs_differ() {
        assert_eq!(interval(&[1.0]), None);
        assert_eq!(interval(&[1.0, 0.0]), None);
        let [low, high] = interval(&[2.0, 2.0, 2.0]).unwrap();
        assert!((low - 2.0).abs() < 1e-9 && (high - 2.0).abs() < 1e-9);
        let [low, high] = interval(&[0.9, 1.0, 1.0 / 0.9]).unwrap();
        // The standard deviation of the logarithms is 0.10536; 4.303 times it over the root of 3 is
        // 0.26175.
        assert!((high.ln() - 0.26175).abs() < 1e-4, "{high}");
        assert!((low * high - 1.0).abs() < 1e-9);
    }
}
