//! `lab bench disk`: a guest with a disk that only its host has, moved under the workloads of the paper on
//! hybrid storage transfer (a guest that nobody moves shows what it gets done).

mod guest;
mod progress;
mod row;

use super::document::Document;
use super::{Bench, Options};
use crate::error::LabError;
use crate::guest::{Chipset, KernelFiles};
use crate::history::workload::Workload;
use crate::installed;
use crate::lab::{Lab, Plan};
use crate::link::spec::LinkSpec;
use crate::peer::mirror::CopyMode;
use guest::Ground;
use progress::Progress;
use row::show;
use std::time::Duration;

/// The bench as `lab bench --list` shows it.
pub(super) const BENCH: Bench = Bench {
    name: "disk",
    about: "a guest with a disk of its host's own under IOR, AsyncWR and CM1, moved by QEMU's mirror",
    minutes: (30, 5),
    run,
};

const LINKS: [&str; 2] = ["200mbit,1ms", "100mbit,20ms"];
/// When a move is given up.
const LIMIT: Duration = Duration::from_secs(120);

/// Who moves the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum System {
    /// Nobody.
    None,
    /// QEMU's mirror.
    Mirror(CopyMode),
}

impl System {
    const ALL: [Self; 3] = [
        Self::None,
        Self::Mirror(CopyMode::Background),
        Self::Mirror(CopyMode::WriteBlocking),
    ];

    /// Its name in rows.
    fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mirror(copy_mode) => copy_mode.system(),
        }
    }

    /// The strategy that its rows are of.
    fn strategy(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Mirror(_) => "mirror",
        }
    }
}

/// What is moved, and when.
#[derive(Debug, Clone, Copy)]
struct Case {
    link: LinkSpec,
    workload: Workload,
    /// From 1.
    repeat: u32,
    repeats: u32,
    seed: u64,
}

/// Measures, adding rows to the document.
fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let systems = systems(options)?;
    let links = links(options)?;
    let lab = Lab::create(&Plan {
        purpose: "bench disk".to_owned(),
        hosts: 2,
        link: links[0],
        seed: options.seed,
    })?;
    let qemu = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&qemu)?;
    document.machine_mut().accel = Some("tcg".to_owned());
    document.machine_mut().qemu = Some(version.clone());
    let major_minor: Vec<&str> = version.split('.').take(2).collect();
    let chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
    let ground = Ground {
        files: KernelFiles::make_with_history(lab.host(0)?.folder())?,
        qemu,
        chipset,
        machine_version: major_minor.join("."),
        lab: &lab,
    };
    for (number, link) in links.into_iter().enumerate() {
        if number > 0 {
            lab.link(0, 1)?.change(link)?;
        }
        document.add_link(link, lab.measure_link(link)?);
        measure(options, link, &systems, &ground, document)?;
    }
    Ok(())
}

fn measure(
    options: &Options,
    link: LinkSpec,
    systems: &[System],
    ground: &Ground<'_>,
    document: &mut Document,
) -> Result<(), LabError> {
    let repeats = options.repeats_or(1);
    for repeat in 1..=repeats {
        for workload in workloads(options) {
            let case = Case {
                link,
                workload,
                repeat,
                repeats,
                seed: options.seed.wrapping_add(u64::from(repeat)),
            };
            let mut undisturbed: Option<Progress> = None;
            for system in systems {
                let (mut row, progress) = ground.run(&case, *system)?;
                row.compare(&progress, undisturbed.as_ref());
                document.add_row(&row, &show(&row));
                if *system == System::None {
                    undisturbed = Some(progress);
                }
            }
        }
    }
    Ok(())
}

fn systems(options: &Options) -> Result<Vec<System>, LabError> {
    let all = System::ALL;
    if let Some(unknown) = options
        .system
        .iter()
        .find(|name| !all.iter().any(|system| system.name() == *name))
    {
        let names = all.map(System::name).join(", ");
        return Err(LabError::Which(format!(
            "this bench has no system `{unknown}`: it has {names}"
        )));
    }
    // What a guest gets done that nobody moves is what all others are compared with: it comes first.
    let wanted = all
        .into_iter()
        .filter(|system| options.wants_system(system.name()));
    Ok(wanted.collect())
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
