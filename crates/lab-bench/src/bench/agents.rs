//! Implements `lab bench agents`: the agents' memory for a large guest, and the savings when
//! several guests move at once.

use super::document::{AskedLink, Document, Sense, median};
use super::{Bench, Options};
use crate::measure::{self, ProcessMeter};
use crate::moves::{PeakRow, attach, attached, meter, ms, settle, verify};
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::error::LabError;
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::product::{Finished, Product, Settings, channel_socket};
use serde::Serialize;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "agents",
    about: "what the agents need for a large guest, and what four guests that move at once save",
    minutes: (12, 4),
    run,
};

const LINK: &str = "100mbit,20ms";
const LIMIT: Duration = Duration::from_secs(900);
const DOWNTIME: &str = "500ms";
/// Guests that move at once.
const GUESTS: u64 = 4;
/// The maximum of what they send together, relative to what they send one after another to an empty
/// destination.
const TOGETHER_MAX: f64 = 0.9;
/// The limit of all moves together, as a divisor of the link's rate.
const LIMIT_PART: u64 = 2;
/// The allowance for traffic beside the limit, such as the agents' messages.
const LIMIT_SLACK: f64 = 1.05;
/// The large guest.
const LARGE_MIB: u64 = 2048;
/// An agent's allowed memory for it: this share of the guest's memory, and a constant for any
/// guest.
const PEAK_SHARE: f64 = 0.01;
const PEAK_BYTES: f64 = 96e6;

#[derive(Debug, Serialize)]
struct Row {
    /// `longhaul-apart`, `longhaul-together`, `longhaul-limited` or `longhaul-large`.
    system: &'static str,
    link: AskedLink,
    workload: &'static str,
    guests: u64,
    guest_memory_bytes: u64,
    repeat: u32,
    outcome: String,
    /// Sum over all guests.
    link_bytes: Option<u64>,
    /// Memory that other guests had brought, over all guests.
    shared_bytes: Option<u64>,
    /// Time from the first command until the last guest runs at the destination.
    total_ms: Option<f64>,
    /// The maximum.
    downtime_ms: Option<f64>,
    /// The limit of all moves together.
    limit_bps: Option<u64>,
    agent_peak_bytes: PeakRow,
    /// Sum over all guests.
    verify_errors: Option<u64>,
}

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let link = options.link_or(LINK)?;
    let mut rows = Vec::new();
    let mut add = |row: Row, document: &mut Document| {
        document.add_row(&row, &show(&row));
        rows.push(row);
    };
    if options.wants_workload("large") {
        for repeat in 1..=options.repeats() {
            // Memory that an agent needed before would count, as far as the agent keeps it.
            let bench = Moving::new(options, link, None, document)?;
            add(bench.large(repeat, options.quick)?, document);
        }
    }
    if options.wants_workload("gang") {
        let bench = Moving::new(options, link, None, document)?;
        for repeat in 1..=options.repeats() {
            add(bench.apart(repeat)?, document);
            add(bench.at_once("longhaul-together", repeat)?, document);
        }
    }
    if options.wants_workload("gang") {
        let bench = Moving::new(options, link, Some(link.rate_bps / LIMIT_PART), document)?;
        for repeat in 1..=options.repeats() {
            add(bench.at_once("longhaul-limited", repeat)?, document);
        }
    }
    judge(&rows, options, document);
    Ok(())
}

struct Moving {
    lab: Lab,
    product: Product,
    link: LinkSpec,
    chipset: Chipset,
    version: String,
    limit_bps: Option<u64>,
    /// The number of guests so far: a guest that has moved away may not be started again under the
    /// same name.
    guests: Cell<u32>,
}

/// A guest that runs at the first host.
struct Running {
    name: String,
    arena: Arena,
}

impl Moving {
    /// Creates two hosts with agents and a limited link.
    fn new(
        options: &Options,
        link: LinkSpec,
        limit_bps: Option<u64>,
        document: &mut Document,
    ) -> Result<Self, LabError> {
        let plan = Plan {
            purpose: "bench agents".to_owned(),
            hosts: 2,
            link,
            seed: options.seed,
        };
        let mut lab = Lab::create(&plan)?;
        document.add_link(link, lab.measure_link(link)?);
        let files = KernelFiles::make(lab.host(0)?.folder())?;
        let settings = Settings {
            qemus: vec![options.qemu.clone()],
            accelerator: "auto".to_owned(),
        };
        let limit = limit_bps.map(|limit| ("bandwidth".to_owned(), format!("{limit}bit").into()));
        let more = toml::Table::from_iter(limit);
        let product = Product::start_with(&mut lab, &files, &settings, &more)?;
        let version = installed::qemu_version(&installed::qemu(&options.qemu)?)?;
        let accelerator = if product.has_kvm(0)? { "kvm" } else { "tcg" };
        document.machine_mut().accel = Some(accelerator.to_owned());
        document.machine_mut().qemu = Some(version.clone());
        Ok(Self {
            lab,
            product,
            link,
            chipset: Chipset::named(&options.machine).unwrap_or(Chipset::Q35),
            version: version.split('.').take(2).collect::<Vec<_>>().join("."),
            limit_bps,
            guests: Cell::new(0),
        })
    }

    fn boot(&self, memory_mib: u64, arena_bytes: u64, seed: u64) -> Result<Running, LabError> {
        self.guests.set(self.guests.get() + 1);
        let name = format!("guest-{}", self.guests.get());
        let mut guest = Tiny::new(&name);
        guest.chipset = self.chipset;
        guest.machine_version.clone_from(&self.version);
        guest.memory_mib = memory_mib;
        let mut arena = attached(&channel_socket(self.lab.host(0)?, &name, CHANNEL_NAME))?;
        attach(
            &arena,
            &channel_socket(self.lab.host(1)?, &name, CHANNEL_NAME),
        )?;
        self.product
            .start_guest(&self.lab, 0, &guest.description())?;
        let workload = Workload {
            content: "mix".to_owned(),
            arena_bytes,
            working_set_bytes: arena_bytes / 4,
            pages_per_s: 50,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed,
        };
        settle(&mut arena, &workload)?;
        Ok(Running { name, arena })
    }

    fn boot_small(&self, number: u64) -> Result<Running, LabError> {
        // Guests of one kind: the same system, and data of their own.
        self.boot(192, 24 << 20, number)
    }

    fn row(&self, system: &'static str, guests: u64, guest_memory_bytes: u64, repeat: u32) -> Row {
        Row {
            system,
            link: self.link.into(),
            workload: if system == "longhaul-large" {
                "large"
            } else {
                "gang"
            },
            guests,
            guest_memory_bytes,
            repeat,
            outcome: "completed".to_owned(),
            link_bytes: Some(0),
            shared_bytes: Some(0),
            total_ms: None,
            downtime_ms: None,
            limit_bps: self.limit_bps,
            agent_peak_bytes: PeakRow::default(),
            verify_errors: Some(0),
        }
    }

    /// Moves each guest alone, to an empty destination.
    fn apart(&self, repeat: u32) -> Result<Row, LabError> {
        let mut row = self.row("longhaul-apart", GUESTS, 192 << 20, repeat);
        let mut total_ms = 0.0;
        for number in 1..=GUESTS {
            let guest = self.boot_small(number)?;
            self.move_all(vec![guest], &mut row)?;
            total_ms += row.total_ms.unwrap_or(f64::NAN);
        }
        row.total_ms = Some(total_ms);
        Ok(row)
    }

    /// Moves all guests at the same time.
    fn at_once(&self, system: &'static str, repeat: u32) -> Result<Row, LabError> {
        let mut row = self.row(system, GUESTS, 192 << 20, repeat);
        let guests: Vec<Running> = (1..=GUESTS)
            .map(|number| self.boot_small(number))
            .collect::<Result<_, _>>()?;
        self.move_all(guests, &mut row)?;
        Ok(row)
    }

    fn large(&self, repeat: u32, quick: bool) -> Result<Row, LabError> {
        let mut row = self.row("longhaul-large", 1, LARGE_MIB << 20, repeat);
        let arena_mib = if quick { 512 } else { 1536 };
        let guest = self.boot(LARGE_MIB, arena_mib << 20, 1)?;
        self.move_all(vec![guest], &mut row)?;
        Ok(row)
    }

    /// Moves guests at the same time, lets them verify their memory, and ends them.
    fn move_all(&self, mut guests: Vec<Running>, row: &mut Row) -> Result<(), LabError> {
        let to = self.lab.host(1)?;
        let link = self.lab.link(0, 1)?;
        let before = link.stats()?;
        let meters = [
            meter(self.product.agent(0)?.pid())?,
            meter(self.product.agent(1)?.pid())?,
        ];
        let words = ["--downtime", DOWNTIME];
        let moves: Vec<_> = guests
            .iter()
            .map(|guest| self.product.migrate(0, &guest.name, to, &words))
            .collect::<Result<_, _>>()?;
        let finished: Vec<Finished> = moves
            .into_iter()
            .map(|moving| moving.finish(LIMIT))
            .collect::<Result<_, _>>()?;
        let carried = link.stats()?.forth.carried_bytes - before.forth.carried_bytes;
        *row.link_bytes.get_or_insert(0) += carried;
        let [source, destination] = meters.map(ProcessMeter::finish);
        let peak = |so_far: Option<u64>, used: Option<measure::Used>| {
            so_far.max(used.map(|used| used.peak_bytes))
        };
        row.agent_peak_bytes.source = peak(row.agent_peak_bytes.source, source);
        row.agent_peak_bytes.destination = peak(row.agent_peak_bytes.destination, destination);
        let began = finished.iter().map(|finished| finished.began).min();
        let ended: Option<Instant> = finished.iter().map(|finished| finished.ended).max();
        row.total_ms = began.zip(ended).map(|(began, ended)| ms(began, ended));
        for (guest, finished) in guests.iter_mut().zip(&finished) {
            self.note(guest, finished, row)?;
        }
        for guest in guests {
            // Its host depends on how the move went.
            let [here, there] = [0, 1].map(|host| self.product.stop_guest(host, &guest.name));
            here.or(there)?;
        }
        Ok(())
    }

    fn note(
        &self,
        guest: &mut Running,
        finished: &Finished,
        row: &mut Row,
    ) -> Result<(), LabError> {
        if !finished.completed() {
            row.outcome = format!("failed: {}: {}", guest.name, finished.why());
        }
        match verify(&mut guest.arena)? {
            Ok(errors) => row.verify_errors = row.verify_errors.map(|sum| sum + errors),
            Err(error) => {
                row.verify_errors = None;
                row.outcome = format!("failed: {}: after the move {error}", guest.name);
            }
        }
        let seen = measure::observe(&guest.arena.beats(), finished.began, finished.ended);
        let downtime_ms = seen.map(|seen| seen.downtime_ms);
        row.downtime_ms = [row.downtime_ms, downtime_ms]
            .into_iter()
            .flatten()
            .reduce(f64::max);
        let bytes = finished.report.as_ref().map(|report| &report.bytes);
        let shared = bytes.and_then(|bytes| bytes.shared_bytes);
        row.shared_bytes = row.shared_bytes.zip(shared).map(|(sum, more)| sum + more);
        Ok(())
    }
}

fn judge(rows: &[Row], options: &Options, document: &mut Document) {
    let sound = |row: &&Row| row.outcome == "completed" && row.verify_errors == Some(0);
    let of = |system: &str, figure: &dyn Fn(&Row) -> Option<f64>| {
        let of_it = |row: &&Row| row.system == system;
        median(rows.iter().filter(sound).filter(of_it).filter_map(figure))
    };
    if options.wants_workload("gang") {
        let bytes = |row: &Row| row.link_bytes.map(|bytes| bytes as f64);
        let together = of("longhaul-together", &bytes);
        let apart = of("longhaul-apart", &bytes);
        let share = together.zip(apart).map(|(ours, theirs)| ours / theirs);
        document.add_check(
            "bytes_together_vs_apart",
            share,
            Sense::AtMost,
            TOGETHER_MAX,
        );
        let rate = |row: &Row| {
            let (bytes, ms) = (row.link_bytes? as f64, row.total_ms?);
            Some(bytes * 8e3 / ms / row.limit_bps? as f64)
        };
        let share = of("longhaul-limited", &rate);
        document.add_check("rate_vs_limit", share, Sense::AtMost, LIMIT_SLACK);
    }
    if options.wants_workload("large") {
        let limit = (LARGE_MIB << 20) as f64 * PEAK_SHARE + PEAK_BYTES;
        let source = |row: &Row| row.agent_peak_bytes.source.map(|bytes| bytes as f64);
        let destination = |row: &Row| row.agent_peak_bytes.destination.map(|bytes| bytes as f64);
        let peaks = [
            ("agent_peak_bytes.source", of("longhaul-large", &source)),
            (
                "agent_peak_bytes.destination",
                of("longhaul-large", &destination),
            ),
        ];
        for (name, peak) in peaks {
            document.add_check(name, peak, Sense::AtMost, limit);
        }
    }
    let failed = rows.iter().filter(|row| !sound(row)).count();
    document.add_check("not_sound", Some(failed as f64), Sense::AtMost, 0.0);
}

fn show(row: &Row) -> String {
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    let mb = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1e6), "MB");
    format!(
        "{:<17} repeat {}: {} over the link, {} in other guests, {}, downtime at most {}, agents' \
         memory {} and {}, errors {}, {}",
        row.system,
        row.repeat,
        mb(row.link_bytes),
        mb(row.shared_bytes),
        number(row.total_ms.map(|ms| ms / 1e3), "s"),
        number(row.downtime_ms, "ms"),
        mb(row.agent_peak_bytes.source),
        mb(row.agent_peak_bytes.destination),
        row.verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        row.outcome,
    )
}
