//! Implements `lab bench predict`: the ranges that plans and moves predict, and the results.

use super::document::{Document, Sense, median};
use super::{Bench, Options};
use crate::moves::{attach, attached, settle, verify};
use longhaul_api::{Judgement, Plan as ApiPlan, PredictedRange, Prediction, Report};
use longhaul_lab::arena::{Arena, Workload};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles, Tiny};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::product::{Finished, Product, Settings, channel_socket};
use serde::Serialize;
use std::fs::File;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

/// The bench's entry of `lab bench --list`.
pub(super) const BENCH: Bench = Bench {
    name: "predict",
    about: "the predicted ranges of data, time and downtime against the results, for first moves \
            and returns over three links",
    minutes: (20, 5),
    run,
};

const LINKS: [&str; 3] = ["100mbit,20ms", "50mbit,300ms,loss=0.5%", "300mbit,5ms"];
const QUICK_LINKS: usize = 2;
const LIMIT: Duration = Duration::from_secs(600);
/// How long a guest runs at the destination before it returns.
const STAYS: Duration = Duration::from_secs(5);
const ASKED_DOWNTIME: &str = "300ms";
const PAGE_BYTES: f64 = 4096.0;
const IMAGE_BYTES: u64 = 256 << 20;
/// The bytes of a disk's image that are not a hole.
const IMAGE_USED_BYTES: usize = 48 << 20;
const PIECE_BYTES: usize = 1 << 20;

/// Predicted figures that must lie in their range, as a share.
const INSIDE: f64 = 0.9;
/// The median error of the middles, as a share of the result.
const OFF_MEDIAN: f64 = 0.25;
/// The largest error of a middle, as a factor.
const OFF_MOST: f64 = 2.0;

/// A guest of the bench.
struct Subject {
    name: &'static str,
    /// The arena's dirty rate as a share of the link's rate.
    dirty_share: f64,
    arena_bytes: u64,
    content: &'static str,
    has_disk: bool,
}

const SUBJECTS: [Subject; 4] = [
    Subject {
        name: "idle",
        dirty_share: 0.0,
        arena_bytes: 48 << 20,
        content: "mix",
        has_disk: false,
    },
    Subject {
        name: "writes",
        dirty_share: 0.3,
        arena_bytes: 48 << 20,
        content: "text",
        has_disk: false,
    },
    Subject {
        name: "disk",
        dirty_share: 0.0,
        arena_bytes: 16 << 20,
        content: "random",
        has_disk: true,
    },
    Subject {
        name: "disk-writes",
        dirty_share: 0.1,
        arena_bytes: 32 << 20,
        content: "mix",
        has_disk: true,
    },
];
const QUICK_SUBJECTS: [&str; 2] = ["writes", "disk"];

/// A figure of a move: its prediction and its result.
#[derive(Debug, Clone, Copy, Serialize)]
struct Figure {
    predicted: Option<PredictedRange>,
    was: Option<f64>,
}

impl Figure {
    fn is_inside(&self) -> Option<bool> {
        let judged = self.predicted?.judge(self.was?.round() as u64);
        Some(judged == Judgement::Inside)
    }

    /// Returns the middle relative to the result.
    fn ratio(&self) -> Option<f64> {
        Some(self.predicted?.likely as f64 / self.was?).filter(|ratio| *ratio > 0.0)
    }
}

/// The figures of a prediction.
#[derive(Debug, Clone, Copy, Serialize)]
struct Figures {
    data: Figure,
    time: Figure,
    downtime: Figure,
}

type Of = fn(&Figures) -> Figure;

const FIGURES: [(&str, Of); 3] = [
    ("data", |figures| figures.data),
    ("time", |figures| figures.time),
    ("downtime", |figures| figures.downtime),
];

impl Figures {
    fn of(prediction: Option<&Prediction>, report: Option<&Report>) -> Self {
        let figure =
            |predicted: Option<PredictedRange>, was: Option<f64>| Figure { predicted, was };
        let whole = |number: Option<u64>| number.map(|number| number as f64);
        Self {
            data: figure(
                prediction.and_then(|it| it.link_bytes),
                whole(report.and_then(|it| it.link_bytes)),
            ),
            time: figure(
                prediction.and_then(|it| it.total_ms),
                whole(report.and_then(|it| it.total_ms)),
            ),
            downtime: figure(
                prediction.and_then(|it| it.downtime_ms),
                report.and_then(|it| it.downtime_ms),
            ),
        }
    }
}

#[derive(Debug, Serialize)]
struct Row {
    system: &'static str,
    link: super::document::AskedLink,
    workload: &'static str,
    /// `there` or `back`.
    way: &'static str,
    outcome: String,
    /// What the move itself predicted while it began.
    move_predicted: Figures,
    /// Number of earlier moves that it learned from.
    learned_from: Option<u32>,
    /// What a plan predicted right before it; null for the first move over a link.
    plan_predicted: Option<Figures>,
    verify_errors: Option<u64>,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let links = match (options.link, options.quick) {
        (Some(link), _) => vec![link],
        (None, quick) => {
            let count = if quick { QUICK_LINKS } else { LINKS.len() };
            let named = LINKS.iter().take(count).map(|link| link.parse());
            let parsed: Result<Vec<LinkSpec>, _> = named.collect();
            parsed.map_err(|error| LabError::Which(format!("{error}")))?
        }
    };
    let wanted = |subject: &&Subject| {
        let is_quick = !options.quick || QUICK_SUBJECTS.contains(&subject.name);
        options.wants_workload(subject.name) && (is_quick || !options.workload.is_empty())
    };
    let subjects: Vec<&Subject> = SUBJECTS.iter().filter(wanted).collect();
    let mut rows = Vec::new();
    for link in links {
        over(link, &subjects, options, &mut rows, document)?;
    }
    judge(&rows, document);
    Ok(())
}

/// Moves all guests over a link that the agents have not seen before.
fn over(
    link: LinkSpec,
    subjects: &[&Subject],
    options: &Options,
    rows: &mut Vec<Row>,
    document: &mut Document,
) -> Result<(), LabError> {
    let plan = Plan {
        purpose: "bench predict".to_owned(),
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
    let folders = [0, 1].map(|host| lab.host(host).map(|host| host.folder().to_owned()));
    let [first, second] = folders;
    let folders = [first?, second?];
    let product = Product::start_each_with(&mut lab, &files, &settings, |host| {
        let folder = folders.get(host).cloned().unwrap_or_default();
        let images = subjects.iter().filter(|it| it.has_disk).map(|subject| {
            let path = image_path(&folder, subject);
            let table = toml::Table::from_iter([
                ("path".to_owned(), path.into()),
                ("format".to_owned(), "raw".into()),
            ]);
            (subject.name.to_owned(), toml::Value::from(table))
        });
        let images = toml::Table::from_iter(images);
        toml::Table::from_iter([
            ("images".to_owned(), images.into()),
            ("kept_memory".to_owned(), toml::Table::new().into()),
        ])
    })?;
    let version = installed::qemu_version(&installed::qemu(&options.qemu)?)?;
    let accelerator = if product.has_kvm(0)? { "kvm" } else { "tcg" };
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());
    for (number, subject) in subjects.iter().enumerate() {
        if subject.has_disk {
            fill(&image_path(&folders[0], subject), options.seed)?;
        }
        let mut guest = Tiny::new(subject.name);
        guest.chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
        guest.machine_version = version.split('.').take(2).collect::<Vec<_>>().join(".");
        guest.disk = subject.has_disk.then(|| subject.name.to_owned());
        let mut bench = Moving::boot(&lab, &product, subject, &guest, link)?;
        for (way, from) in [("there", 0), ("back", 1)] {
            // The agents know the link only by what they have moved over it.
            let plans = number > 0 || way == "back";
            let row = bench.move_once(subject, (link, way, from), plans)?;
            document.add_row(&row, &show(&row));
            let completed = row.outcome == "completed";
            rows.push(row);
            if !completed {
                break;
            }
        }
        bench.end()?;
    }
    Ok(())
}

fn image_path(folder: &Path, subject: &Subject) -> String {
    let path = folder.join(format!("{}.raw", subject.name));
    path.display().to_string()
}

/// Creates an image: holes, and pieces that compress to about a half.
fn fill(path: &str, seed: u64) -> Result<(), LabError> {
    let writing = || format!("write {path}");
    let mut file = File::create(path).during(writing)?;
    file.set_len(IMAGE_BYTES).during(writing)?;
    let pieces = IMAGE_USED_BYTES / PIECE_BYTES;
    let apart = IMAGE_BYTES / pieces as u64;
    let mut state = seed | 1;
    for piece in 0..pieces {
        let mut content = Vec::with_capacity(PIECE_BYTES);
        while content.len() < PIECE_BYTES {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            content.extend_from_slice(&state.to_le_bytes());
            content.extend_from_slice(&(piece as u64).to_le_bytes());
        }
        let at = SeekFrom::Start(piece as u64 * apart);
        file.seek(at).during(writing)?;
        file.write_all(&content).during(writing)?;
    }
    file.sync_all().during(writing)
}

struct Moving<'a> {
    lab: &'a Lab,
    product: &'a Product,
    arena: Arena,
    name: String,
    at: usize,
}

impl<'a> Moving<'a> {
    fn boot(
        lab: &'a Lab,
        product: &'a Product,
        subject: &Subject,
        guest: &Tiny,
        link: LinkSpec,
    ) -> Result<Self, LabError> {
        let socket = |host: usize| {
            let host = lab.host(host)?;
            Ok::<_, LabError>(channel_socket(host, &guest.name, CHANNEL_NAME))
        };
        let mut arena = attached(&socket(0)?)?;
        attach(&arena, &socket(1)?)?;
        let mut description = guest.description();
        for disk in &mut description.disks {
            disk.shared = false;
        }
        product.start_guest(lab, 0, &description)?;
        let bytes_per_s = link.rate_bps as f64 / 8.0 * subject.dirty_share;
        let workload = Workload {
            content: subject.content.to_owned(),
            arena_bytes: subject.arena_bytes,
            working_set_bytes: subject.arena_bytes / 4,
            pages_per_s: (bytes_per_s / PAGE_BYTES).round() as u64,
            write_bytes: 512,
            writers: 1,
            verify_pages_per_s: 1000,
            seed: 1,
        };
        settle(&mut arena, &workload)?;
        Ok(Self {
            lab,
            product,
            arena,
            name: guest.name.clone(),
            at: 0,
        })
    }

    fn move_once(
        &mut self,
        subject: &Subject,
        (link, way, from): (LinkSpec, &'static str, usize),
        plans: bool,
    ) -> Result<Row, LabError> {
        interrupt::sleep(STAYS)?;
        let to = self.lab.host(1 - from)?;
        let asked = ["--downtime", ASKED_DOWNTIME];
        let plan: Option<ApiPlan> = match plans {
            true => {
                let words = ["plan", &self.name, "--to", to.name()];
                Some(self.product.ask(from, &[&words[..], &asked].concat())?)
            }
            false => None,
        };
        let moving = self.product.migrate(from, &self.name, to, &asked)?;
        let finished = moving.finish(LIMIT)?;
        let completed = finished.completed();
        if completed {
            self.at = 1 - from;
        }
        let verify_errors = match way {
            // The workload goes on for the way back.
            "there" => None,
            _ => verify(&mut self.arena)?.ok(),
        };
        Ok(row(
            subject,
            (link, way),
            plan.as_ref(),
            &finished,
            verify_errors,
        ))
    }

    fn end(self) -> Result<(), LabError> {
        self.product.stop_guest(self.at, &self.name)
    }
}

fn row(
    subject: &Subject,
    (link, way): (LinkSpec, &'static str),
    plan: Option<&ApiPlan>,
    finished: &Finished,
    verify_errors: Option<u64>,
) -> Row {
    let report = finished.report.as_deref();
    let predicted = report.and_then(|report| report.predicted.as_ref());
    Row {
        system: "longhaul",
        link: link.into(),
        workload: subject.name,
        way,
        outcome: match finished.completed() {
            true => "completed".to_owned(),
            false => format!("failed: {}", finished.why()),
        },
        move_predicted: Figures::of(predicted, report),
        learned_from: predicted.map(|predicted| predicted.learned_from),
        plan_predicted: plan.map(|plan| Figures::of(plan.predictions.first(), report)),
        verify_errors,
    }
}

fn judge(rows: &[Row], document: &mut Document) {
    let completed = || rows.iter().filter(|row| row.outcome == "completed");
    let moves: Vec<Figures> = completed().map(|row| row.move_predicted).collect();
    let plans: Vec<Figures> = completed().filter_map(|row| row.plan_predicted).collect();
    for (by, all) in [("move", moves), ("plan", plans)] {
        for (name, of) in FIGURES {
            let figures: Vec<Figure> = all.iter().map(of).collect();
            judge_figure(&format!("{by}.{name}"), &figures, document);
        }
    }
    let failed = rows.len() - completed().count();
    document.add_check("not_completed", Some(failed as f64), Sense::AtMost, 0.0);
    let errors: u64 = rows.iter().filter_map(|row| row.verify_errors).sum();
    document.add_check("verify_errors", Some(errors as f64), Sense::AtMost, 0.0);
}

/// Judges the predictions of one figure. One without a prediction is not inside.
fn judge_figure(name: &str, figures: &[Figure], document: &mut Document) {
    let count = figures.len() as f64;
    let inside = figures
        .iter()
        .filter(|figure| figure.is_inside() == Some(true));
    let inside = (count > 0.0).then(|| inside.count() as f64 / count);
    document.add_check(&format!("inside.{name}"), inside, Sense::AtLeast, INSIDE);
    let ratios = || figures.iter().filter_map(Figure::ratio);
    let off = median(ratios().map(|ratio| (ratio - 1.0).abs()));
    document.add_check(
        &format!("off_median.{name}"),
        off,
        Sense::AtMost,
        OFF_MEDIAN,
    );
    let most = ratios()
        .map(|ratio| ratio.max(1.0 / ratio))
        .max_by(f64::total_cmp);
    document.add_check(&format!("off_most.{name}"), most, Sense::AtMost, OFF_MOST);
}

fn show(row: &Row) -> String {
    let figures = |figures: &Figures| {
        let show = |figure: Figure, unit: f64, name: &str| {
            let PredictedRange { low, likely, high } = match figure.predicted {
                None => return "nothing".to_owned(),
                Some(range) => range,
            };
            let [low, likely, high] = [low, likely, high].map(|value| value as f64 / unit);
            let was = figure.was.unwrap_or(f64::NAN) / unit;
            let mark = if figure.is_inside() == Some(true) {
                ""
            } else {
                " OUTSIDE"
            };
            format!("{likely:.1} ({low:.1} to {high:.1}) was {was:.1} {name}{mark}")
        };
        [
            show(figures.data, 1e6, "MB"),
            show(figures.time, 1e3, "s"),
            show(figures.downtime, 1.0, "ms"),
        ]
        .join(", ")
    };
    let plan = row.plan_predicted.as_ref().map(figures);
    format!(
        "{:<11} {:<5} {:.0} Mbit/s {:.0} ms: move {}; plan {}; {}",
        row.workload,
        row.way,
        row.link.rate_bps as f64 / 1e6,
        row.link.rtt_ms,
        figures(&row.move_predicted),
        plan.unwrap_or_else(|| "none".to_owned()),
        row.outcome,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(low: u64, likely: u64, high: u64, was: f64) -> Figure {
        Figure {
            predicted: Some(PredictedRange { low, likely, high }),
            was: Some(was),
        }
    }

    fn judged(figures: &[Figure]) -> Vec<(Option<f64>, bool)> {
        let mut document = Document::new("predict");
        judge_figure("move.time", figures, &mut document);
        let value = serde_json::to_value(&document).unwrap();
        let checks = value["checks"].as_array().unwrap().iter();
        checks
            .map(|check| (check["value"].as_f64(), check["holds"].as_bool().unwrap()))
            .collect()
    }

    #[test]
    fn each_bar_is_computed_from_all_moves() {
        let good = figure(80, 100, 120, 110.0);
        let mut figures = vec![good; 9];
        figures.push(figure(80, 100, 120, 160.0));
        let [inside, median, most] = judged(&figures)[..] else {
            panic!("three checks");
        };
        assert_eq!(inside, (Some(0.9), true));
        assert!((median.0.unwrap() - 1.0 / 11.0).abs() < 1e-9 && median.1);
        assert_eq!(most, (Some(1.6), true));
        figures.push(figure(80, 100, 120, 250.0));
        let checks = judged(&figures);
        assert!(!checks[0].1 && checks[1].1 && !checks[2].1, "{checks:?}");
    }

    #[test]
    fn what_was_not_predicted_is_not_inside() {
        let none = Figure {
            predicted: None,
            was: Some(1.0),
        };
        let checks = judged(&[none]);
        assert_eq!(checks[0], (Some(0.0), false));
        assert_eq!(checks[1], (None, false));
        assert!(
            judged(&[])
                .iter()
                .all(|(value, holds)| value.is_none() && !holds)
        );
    }
}
