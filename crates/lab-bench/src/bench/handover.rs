//! Implements `lab bench handover`: how long an idle guest is stopped over a long-distance link,
//! and the parts of that time.

use super::document::{Document, Sense, median};
use super::{Bench, Options};
use crate::measure;
use crate::moves::{attach, attached, settle, verify};
use longhaul_api::DowntimeParts;
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Host, Lab, Plan};
use longhaul_lab::product::{Product, Settings, channel_socket};
use serde::Serialize;
use std::fs::{self, File};
use std::io::Write;
use std::time::{Duration, Instant};

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "handover",
    about: "how long an idle guest is stopped over a far link, with late and early release",
    minutes: (3, 1),
    run,
};

const LINK: &str = "100mbit,100ms";
const GUEST: &str = "idle";
const LIMIT: Duration = Duration::from_secs(120);
const REPEATS: u32 = 5;
const SYNCS: usize = 50;
const SYNC_BYTES: usize = 4096;
/// The allowance of a handover beside round trips and syncs.
const ALLOWANCE_MS: f64 = 150.0;

/// When the source releases the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Release {
    Late,
    Early,
}

impl Release {
    const ALL: [Self; 2] = [Self::Late, Self::Early];

    fn name(self) -> &'static str {
        match self {
            Self::Late => "late",
            Self::Early => "early",
        }
    }

    fn words(self) -> &'static [&'static str] {
        match self {
            Self::Late => &[],
            Self::Early => &["--early-release"],
        }
    }

    /// Returns the number of round trips of the guest's stop.
    fn round_trips(self) -> f64 {
        match self {
            Self::Late => 1.5,
            Self::Early => 0.5,
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    system: &'static str,
    release: Release,
    repeat: u32,
    outcome: String,
    /// As measured from outside: the longest gap between heartbeats less the usual one.
    downtime_ms: Option<f64>,
    usual_gap_ms: Option<f64>,
    /// As measured by the agents.
    parts: Option<DowntimeParts>,
    sync_ms: Option<f64>,
    verify_errors: Option<u64>,
}

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let releases: Vec<Release> = Release::ALL
        .into_iter()
        .filter(|release| options.wants_system(release.name()))
        .collect();
    let link = options.link_or(LINK)?;
    let plan = Plan {
        purpose: "bench handover".to_owned(),
        hosts: 2,
        link,
        seed: options.seed,
    };
    let mut lab = Lab::create(&plan)?;
    let measured = lab.measure_link(link)?;
    document.add_link(link, measured);
    let files = KernelFiles::make(lab.host(0)?.folder())?;
    let settings = Settings {
        qemus: vec![options.qemu.clone()],
        accelerator: "auto".to_owned(),
    };
    let product = Product::start(&mut lab, &files, &settings)?;
    let version = installed::qemu_version(&installed::qemu(&options.qemu)?)?;
    let accelerator = if product.has_kvm(0)? { "kvm" } else { "tcg" };
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());

    let mut guest = Tiny::new(GUEST);
    guest.chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
    guest.machine_version = version.split('.').take(2).collect::<Vec<_>>().join(".");
    let mut bench = Moving::boot(lab, product, &guest)?;
    let repeats = options.repeats_or(REPEATS);
    let mut rows = Vec::new();
    for repeat in 1..=repeats {
        for release in &releases {
            let row = bench.move_once(*release, repeat)?;
            document.add_row(&row, &show(&row));
            rows.push(row);
        }
    }
    for release in releases {
        judge(&rows, release, measured.rtt_ms, document);
    }
    Ok(())
}

struct Moving {
    lab: Lab,
    product: Product,
    arena: Arena,
    at: usize,
}

impl Moving {
    fn boot(lab: Lab, product: Product, guest: &Tiny) -> Result<Self, LabError> {
        let mut arena = attached(&channel_socket(lab.host(0)?, &guest.name, CHANNEL_NAME))?;
        attach(
            &arena,
            &channel_socket(lab.host(1)?, &guest.name, CHANNEL_NAME),
        )?;
        product.start_guest(&lab, 0, &guest.description())?;
        let idle = Workload {
            content: "mix".to_owned(),
            arena_bytes: 8 << 20,
            working_set_bytes: 0,
            pages_per_s: 0,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed: 1,
        };
        settle(&mut arena, &idle)?;
        Ok(Self {
            lab,
            product,
            arena,
            at: 0,
        })
    }

    fn move_once(&mut self, release: Release, repeat: u32) -> Result<Row, LabError> {
        interrupt::sleep(measure::BEFORE)?;
        let (source, destination) = (self.lab.host(self.at)?, self.lab.host(1 - self.at)?);
        let sync_ms = median([sync_ms(source)?, sync_ms(destination)?]);
        let moving = self
            .product
            .migrate(self.at, GUEST, destination, release.words())?;
        let finished = moving.finish(LIMIT)?;
        let errors = verify(&mut self.arena)?;
        let observed = measure::observe(&self.arena.beats(), finished.began, finished.ended);
        let completed = finished.completed();
        if completed {
            self.at = 1 - self.at;
        }
        Ok(Row {
            system: "longhaul",
            release,
            repeat,
            outcome: match completed {
                true => "completed".to_owned(),
                false => format!("failed: {}", finished.why()),
            },
            downtime_ms: observed
                .as_ref()
                .filter(|_| completed)
                .map(|observed| observed.downtime_ms),
            usual_gap_ms: observed.map(|observed| observed.usual_gap_ms),
            parts: finished.report.map(|report| report.downtime),
            sync_ms,
            verify_errors: errors.ok(),
        })
    }
}

/// Returns the median time of a durable append of 4 KiB in a host's folder of journals.
fn sync_ms(host: &Host) -> Result<f64, LabError> {
    let path = host.folder().join("sync");
    let syncing = || format!("append to {}", path.display());
    let mut file = File::create(&path).during(syncing)?;
    let block = [7_u8; SYNC_BYTES];
    let mut times = Vec::with_capacity(SYNCS);
    for _ in 0..SYNCS {
        let began = Instant::now();
        file.write_all(&block)
            .and_then(|()| file.sync_all())
            .during(syncing)?;
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    fs::remove_file(&path).during(syncing)?;
    Ok(median(times).unwrap_or(0.0))
}

fn judge(rows: &[Row], release: Release, rtt_ms: f64, document: &mut Document) {
    let sound = |row: &&Row| {
        row.release == release && row.outcome == "completed" && row.verify_errors == Some(0)
    };
    let of =
        |figure: &dyn Fn(&Row) -> Option<f64>| median(rows.iter().filter(sound).filter_map(figure));
    let sync_ms = of(&|row| row.sync_ms).unwrap_or(0.0);
    let limit = release.round_trips() * rtt_ms + ALLOWANCE_MS + 2.0 * sync_ms;
    let name = format!("downtime_ms.{}", release.name());
    document.add_check(&name, of(&|row| row.downtime_ms), Sense::AtMost, limit);
}

fn show(row: &Row) -> String {
    let ms =
        |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.0} ms"));
    let parts = row.parts.clone().unwrap_or_default();
    format!(
        "{:<5} repeat {}: downtime {} (stop {}, last pages {}, device state {}, load {}, commit \
         {}), sync {:.1} ms, {}",
        row.release.name(),
        row.repeat,
        ms(row.downtime_ms),
        ms(parts.stop_ms),
        ms(parts.last_pages_ms),
        ms(parts.device_state_ms),
        ms(parts.load_ms),
        ms(parts.commit_ms),
        row.sync_ms.unwrap_or(0.0),
        row.outcome,
    )
}
