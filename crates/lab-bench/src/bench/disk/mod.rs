//! Implements `lab bench disk`: moves a guest with a local disk under the workloads of the paper on
//! hybrid storage transfer; a guest that is not moved is the reference for its throughput.

mod guest;
mod judge;
mod longhaul;
mod picture;
mod progress;
mod row;

use super::document::Document;
use super::{Bench, Options};
use crate::peer::mirror::CopyMode;
use guest::Ground;
use longhaul_api::DiskChoice;
use longhaul_lab::error::LabError;
use longhaul_lab::guest::{Chipset, KernelFiles};
use longhaul_lab::history::workload::Workload;
use longhaul_lab::installed;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use progress::Progress;
use row::{Row, show};
use std::time::Duration;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "disk",
    about: "a guest with a disk of its host's own under IOR, AsyncWR and CM1, moved by Longhaul's \
            strategies and by QEMU's mirror",
    minutes: (40, 5),
    run,
};

/// The systems of a short run, with one of Longhaul's strategies.
const QUICK: [&str; 4] = [
    "none",
    "qemu-mirror",
    "qemu-mirror-write-blocking",
    "hybrid",
];
const LINKS: [&str; 2] = ["200mbit,1ms", "100mbit,20ms"];
/// The time limit of a move.
const LIMIT: Duration = Duration::from_secs(120);

/// The system that moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    /// None: the guest is not moved.
    None,
    /// QEMU's mirror.
    Mirror(CopyMode),
    /// Longhaul, with this strategy for the disk.
    Longhaul(DiskChoice),
}

impl System {
    /// Returns all systems.
    fn all() -> Vec<Self> {
        let strategies = DiskChoice::ALL
            .into_iter()
            .filter(|choice| *choice != DiskChoice::Auto);
        let mirrors = [CopyMode::Background, CopyMode::WriteBlocking];
        // The reference guest, which is not moved, comes first: all others are compared with it.
        [Self::None]
            .into_iter()
            .chain(mirrors.map(Self::Mirror))
            .chain(strategies.map(Self::Longhaul))
            .collect()
    }

    /// Returns whether a name on the command line means it.
    fn is_named(self, name: &str) -> bool {
        self.name() == name || self.is_longhaul() && self.strategy() == name
    }

    fn is_longhaul(self) -> bool {
        matches!(self, Self::Longhaul(_))
    }

    /// Returns its name in rows.
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mirror(copy_mode) => copy_mode.system(),
            Self::Longhaul(_) => "longhaul",
        }
    }

    /// Returns the strategy in its rows.
    fn strategy(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mirror(_) => "mirror",
            Self::Longhaul(choice) => choice.name(),
        }
    }
}

/// The guest and the beginning of the move.
#[derive(Debug, Clone, Copy)]
struct Case {
    link: LinkSpec,
    workload: Workload,
    /// The repeat, from 1.
    repeat: u32,
    repeats: u32,
    seed: u64,
}

/// Runs the bench, adding rows and then checks to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let systems = systems(options)?;
    let links = links(options)?;
    let mut lab = Lab::create(&Plan {
        purpose: "bench disk".to_owned(),
        hosts: 2,
        link: links[0],
        seed: options.seed,
    })?;
    let qemu = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&qemu)?;
    let major_minor: Vec<&str> = version.split('.').take(2).collect();
    let cases: Vec<Case> = links
        .iter()
        .flat_map(|link| cases(options, *link))
        .collect();
    let files = KernelFiles::make_with_history(lab.host(0)?.folder())?;
    let strategies: Vec<DiskChoice> = cases
        .iter()
        .flat_map(|_| &systems)
        .filter_map(|system| match system {
            System::Longhaul(choice) => Some(*choice),
            _ => None,
        })
        .collect();
    let product = match strategies.is_empty() {
        true => None,
        false => Some(longhaul::start(&mut lab, &files, options, &strategies)?),
    };
    // Baselines run with the same accelerator as Longhaul's guests.
    let kvm = product.as_ref().map_or(Ok(false), |it| it.has_kvm(0))?;
    let accelerator = if kvm { "kvm" } else { "tcg" };
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());
    let mut ground = Ground {
        chipset: Chipset::named(&options.machine).unwrap_or(Chipset::Q35),
        machine_version: major_minor.join("."),
        lab: &lab,
        accelerator,
        files,
        qemu,
        product,
        images: 0,
    };
    let mut rows = Vec::new();
    for (number, link) in links.iter().enumerate() {
        if number > 0 {
            lab.link(0, 1)?.change(*link)?;
        }
        document.add_link(*link, lab.measure_link(*link)?);
        for case in cases.iter().filter(|case| case.link == *link) {
            rows.extend(measure(case, &systems, &mut ground, document)?);
        }
    }
    judge::judge(&rows, links[0], document);
    Ok(())
}

/// Lets every system move the guest of a case.
fn measure(
    case: &Case,
    systems: &[System],
    ground: &mut Ground<'_>,
    document: &mut Document,
) -> Result<Vec<Row>, LabError> {
    let mut rows = Vec::new();
    let mut undisturbed: Option<Progress> = None;
    for system in systems {
        let (mut row, progress) = ground.run(case, *system)?;
        row.compare(&progress, undisturbed.as_ref());
        document.add_row(&row, &show(&row));
        rows.push(row);
        if *system == System::None {
            undisturbed = Some(progress);
        }
    }
    Ok(rows)
}

/// Returns the cases of a link. Those with checks are repeated, the others run only on request.
fn cases(options: &Options, link: LinkSpec) -> Vec<Case> {
    let is_first = LINKS[0].parse() == Ok(link);
    let mut cases = Vec::new();
    for repeat in 1..=options.repeats() {
        for workload in workloads(options) {
            let has_bar = is_first && workload == Workload::Ior;
            let repeats = match has_bar {
                true => options.repeats(),
                false => options.repeats_or(1),
            };
            if repeat <= repeats {
                cases.push(Case {
                    link,
                    workload,
                    repeat,
                    repeats,
                    seed: options.seed.wrapping_add(u64::from(repeat)),
                });
            }
        }
    }
    cases
}

fn systems(options: &Options) -> Result<Vec<System>, LabError> {
    let all = System::all();
    let named = |name: &String| all.iter().any(|system| system.is_named(name));
    if let Some(unknown) = options.system.iter().find(|name| !named(name)) {
        let mut names: Vec<&str> = all.iter().map(|system| system.name()).collect();
        names.dedup();
        let strategies = all.iter().filter(|system| system.is_longhaul());
        names.extend(strategies.map(|system| system.strategy()));
        return Err(LabError::Which(format!(
            "this bench has no system `{unknown}`: it has {}",
            names.join(", ")
        )));
    }
    let wanted = |system: &System| match options.system.is_empty() {
        true => !options.quick || QUICK.iter().any(|name| system.is_named(name)),
        false => options.system.iter().any(|name| system.is_named(name)),
    };
    Ok(all.into_iter().filter(wanted).collect())
}

fn workloads(options: &Options) -> impl Iterator<Item = Workload> {
    let all = Workload::OF_THE_PAPER.into_iter();
    let quick = |workload: &Workload| !options.quick || *workload == Workload::Ior;
    all.filter(move |workload| match options.workload.is_empty() {
        true => quick(workload),
        false => options.wants_workload(workload.name()),
    })
}

fn links(options: &Options) -> Result<Vec<LinkSpec>, LabError> {
    let own = match options.quick {
        true => &LINKS[..1],
        false => &LINKS[..],
    };
    match options.link {
        Some(link) => Ok(vec![link]),
        None => own.iter().map(|link| options.link_or(link)).collect(),
    }
}
