//! Implements `lab results`: generates the page of results, with tables and plots, from the
//! documents of benches.
//!
//! The documents are in a folder `documents` beside the page, a file for each bench. The page can
//! be regenerated from them at any time; nothing on it has another source.

mod cases;
mod codec;
mod disks;
mod moves;
mod network;
mod parcel;
mod predict;
mod redundancy;
mod rows;
mod strategies;
mod svg;

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use self::rows::Rows;
use self::svg::Plot;
use longhaul_lab::error::{During, LabError};

/// The maximum number of bytes of a document.
const DOCUMENT_BYTES_MAX: u64 = 64 << 20;

/// A document as printed by `lab bench NAME --json`.
#[derive(Debug, Clone, Deserialize)]
struct Saved {
    /// The name of its file: one bench may have run on several guests.
    #[serde(skip)]
    name: String,
    bench: String,
    commit: Option<String>,
    started: Option<String>,
    command: Option<String>,
    machine: Machine,
    #[serde(default)]
    rows: Vec<Value>,
    #[serde(default)]
    checks: Vec<SavedCheck>,
}

#[derive(Debug, Clone, Deserialize)]
struct Machine {
    cpu: Option<String>,
    cores: usize,
    kernel: Option<String>,
    accel: Option<String>,
    qemu: Option<String>,
}

#[derive(Debug, Clone, Deserialize)]
struct SavedCheck {
    name: String,
    value: Option<f64>,
    limit: f64,
    sense: String,
    holds: bool,
}

/// The section of one bench: text in Markdown, and plots by the names of their files.
#[derive(Debug, Default)]
struct Section {
    text: String,
    plots: Vec<(String, Plot)>,
}

impl Section {
    fn paragraph(&mut self, text: &str) {
        let _ = writeln!(self.text, "{text}\n");
    }

    fn heading(&mut self, text: &str) {
        let _ = writeln!(self.text, "### {text}\n");
    }

    fn table(&mut self, head: &[&str], rows: &[Vec<String>]) {
        let _ = writeln!(self.text, "| {} |", head.join(" | "));
        let _ = writeln!(self.text, "|{}", "---|".repeat(head.len()));
        for row in rows {
            let cells: Vec<String> = row.iter().map(|cell| cell.replace('|', "\\|")).collect();
            let _ = writeln!(self.text, "| {} |", cells.join(" | "));
        }
        self.text.push('\n');
    }

    /// Adds a plot, if it has anything to show.
    fn plot(&mut self, file: &str, plot: Plot) {
        let has_value =
            |(_, values): &(String, Vec<Option<f64>>)| values.iter().any(Option::is_some);
        if !plot.series.iter().any(has_value) {
            return;
        }
        let _ = writeln!(self.text, "![{}]({file}.svg)\n", plot.title);
        self.plots.push((file.to_owned(), plot));
    }
}

/// Generates the page of the documents in `FOLDER/documents`: `FOLDER/README.md` and its plots. The
/// commentary on the results is in `FOLDER/notes.md`.
///
/// # Errors
/// When there is no document, one cannot be read, or the page cannot be written.
pub fn make(folder: &Path) -> Result<(), LabError> {
    let documents = read(&folder.join("documents"))?;
    let notes = folder.join("notes.md");
    let notes = match notes.exists() {
        true => fs::read_to_string(&notes).during(|| format!("read {}", notes.display()))?,
        false => String::new(),
    };
    let (page, plots) = page(&documents, &notes);
    // Plots of removed benches are deleted.
    for old in files(folder, "svg")? {
        fs::remove_file(&old).during(|| format!("remove {}", old.display()))?;
    }
    let write = |name: &str, content: &str| {
        let path = folder.join(name);
        fs::write(&path, content).during(|| format!("write {}", path.display()))
    };
    for (name, plot) in plots {
        write(&format!("{name}.svg"), &plot.svg())?;
    }
    write("README.md", &page)
}

fn read(folder: &Path) -> Result<Vec<Saved>, LabError> {
    let mut documents = Vec::new();
    for path in files(folder, "json")? {
        let doing = || format!("read {}", path.display());
        let bytes = fs::metadata(&path).during(doing)?.len();
        let answer = |message: String| LabError::Answer {
            what: path.display().to_string(),
            message,
        };
        if bytes > DOCUMENT_BYTES_MAX {
            return Err(answer(format!("{bytes} bytes are no bench's document")));
        }
        let text = fs::read_to_string(&path).during(doing)?;
        let mut document: Saved =
            serde_json::from_str(&text).map_err(|error| answer(error.to_string()))?;
        let name = path.file_stem().unwrap_or_default();
        document.name = name.to_string_lossy().into_owned();
        documents.push(document);
    }
    if documents.is_empty() {
        return Err(LabError::Which(format!(
            "there is no document in {} (hint: lab bench NAME --json > {}/NAME.json)",
            folder.display(),
            folder.display()
        )));
    }
    Ok(documents)
}

/// Returns the files of a folder with this extension, sorted; an empty one is a bench that did not
/// run.
fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>, LabError> {
    let doing = || format!("list {}", folder.display());
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).during(doing)? {
        let entry = entry.during(doing)?;
        let path = entry.path();
        let is_empty = entry.metadata().during(doing)?.len() == 0;
        if path.extension().is_some_and(|found| found == extension) && !is_empty {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn page(documents: &[Saved], notes: &str) -> (String, Vec<(String, Plot)>) {
    let mut head = Section::default();
    head.text.push_str(HEAD);
    let rows: Vec<Vec<String>> = documents.iter().map(overview).collect();
    head.table(
        &["bench", "started", "commit", "machine", "checks that hold"],
        &rows,
    );
    if !notes.trim().is_empty() {
        head.paragraph(notes.trim());
    }
    let (mut text, mut plots) = (head.text, Vec::new());
    for document in documents {
        let section = section(document, documents);
        let _ = write!(text, "## {}\n\n{}", document.name, section.text);
        plots.extend(section.plots);
    }
    // No empty line at the end.
    text.truncate(text.trim_end().len());
    text.push('\n');
    (text, plots)
}

const HEAD: &str = "# Benchmarks

`sudo make bench` runs every bench and makes this page; `target/release/lab results docs/benchmarks`
makes it again from the documents in [documents](documents). Values are medians of the repeats of \
        one
run. A check that does not hold is shown as such. Times of one machine say little about another;
shares and ratios say more.

";

fn overview(document: &Saved) -> Vec<String> {
    let holding = document.checks.iter().filter(|check| check.holds).count();
    let unknown = || "not known".to_owned();
    let commit = document.commit.as_deref().unwrap_or("not known");
    let (hash, dirty) = commit.split_once('-').unwrap_or((commit, ""));
    let machine = &document.machine;
    let mut machine_text = format!(
        "{}, {} cores, Linux {}",
        machine.cpu.as_deref().unwrap_or("processor not known"),
        machine.cores,
        machine.kernel.as_deref().unwrap_or("not known"),
    );
    if let Some(qemu) = &machine.qemu {
        let accel = machine.accel.as_deref().unwrap_or("not known");
        let _ = write!(machine_text, ", QEMU {qemu} ({accel})");
    }
    vec![
        format!("[{0}](#{0})", document.name),
        document.started.clone().unwrap_or_else(unknown),
        format!(
            "{}{}",
            hash.get(..12).unwrap_or(hash),
            if dirty.is_empty() { "" } else { " and changes" }
        ),
        machine_text,
        match document.checks.len() {
            0 => "none to hold".to_owned(),
            all => format!("{holding} of {all}"),
        },
    ]
}

fn section(document: &Saved, documents: &[Saved]) -> Section {
    let mut section = Section::default();
    let command = document.command.clone();
    let command = command.unwrap_or_else(|| format!("lab bench {} --json", document.bench));
    let quick = match command.split(' ').any(|word| word == "--quick") {
        true => " (fewer cases and repeats than a whole run)",
        false => "",
    };
    section.paragraph(&format!(
        "`{command}`{quick}: [{0}.json](documents/{0}.json)",
        document.name
    ));
    let rows = Rows::of(&document.rows);
    match document.bench.as_str() {
        "agents" => moves::show_agents(&rows, &mut section),
        "codec" => codec::show(&rows, &mut section),
        "redundancy" => {
            let moves = documents.iter().filter(|other| other.bench == "memory");
            let moves = Rows(moves.flat_map(|moves| &moves.rows).collect());
            redundancy::show(&rows, &moves, &mut section);
        }
        "disk" => disks::show(&rows, &document.name, &mut section),
        "memory" => moves::show(&rows, &document.name, &mut section),
        "handover" => moves::show_handover(&rows, &mut section),
        "link" => moves::show_link(&rows, &mut section),
        "network" => network::show(&rows, &mut section),
        "parcel" => parcel::show(&rows, &mut section),
        "predict" => predict::show(&rows, &mut section),
        "strategies" => strategies::show(&rows, &document.name, &mut section),
        _ => {}
    }
    if !document.checks.is_empty() {
        section.heading(&format!("Checks of {}", document.name));
        let rows: Vec<Vec<String>> = document.checks.iter().map(check).collect();
        section.table(&["check", "value", "bar", "holds"], &rows);
    }
    section
}

fn check(check: &SavedCheck) -> Vec<String> {
    vec![
        format!("`{}`", check.name),
        check
            .value
            .map_or_else(|| "not measured".to_owned(), number),
        format!("{} {}", check.sense.replace('_', " "), number(check.limit)),
        if check.holds { "yes" } else { "**no**" }.to_owned(),
    ]
}

/// Formats a number with about three significant digits.
fn number(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Formats a number with a unit, or a dash where there is none.
fn maybe(value: Option<f64>, unit: f64) -> String {
    value.map_or_else(|| "-".to_owned(), |value| number(value / unit))
}

fn percent(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{:.1} %", value * 100.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn document(bench: &str, rows: Value) -> Value {
        json!({
            "bench": bench,
            "commit": "0123456789abcdef-dirty",
            "started": "2026-01-01 10:00 UTC",
            "command": format!("lab bench {bench} --json --quick"),
            "machine": {"cpu": "CPU", "cores": 2, "kernel": "6.1", "accel": null, "qemu": null},
            "link": null,
            "rows": rows,
            "checks": [
                {"name": "good.x", "value": 0.25, "limit": 0.5, "sense": "at_most", "holds": true},
                {"name": "bad.x", "value": null, "limit": 5.0, "sense": "at_least", "holds": false},
            ],
        })
    }

    fn made(documents: &[Value]) -> (tempfile::TempDir, String) {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("documents")).unwrap();
        for document in documents {
            let name = format!("documents/{}.json", document["bench"].as_str().unwrap());
            fs::write(folder.path().join(name), document.to_string()).unwrap();
        }
        fs::write(folder.path().join("documents/none.json"), "").unwrap();
        fs::write(folder.path().join("notes.md"), "A note.\n").unwrap();
        make(folder.path()).unwrap();
        let page = fs::read_to_string(folder.path().join("README.md")).unwrap();
        (folder, page)
    }

    #[test]
    fn the_page_shows_medians_checks_and_how_to_repeat() {
        let row = |system: &str, bytes: f64, outcome: &str| {
            json!({
                "system": system, "workload": "mix", "outcome": outcome, "verify_errors": 0,
                "link_bytes": bytes, "total_ms": 2000.0, "downtime_ms": 90.0,
                "parameters": {"dirty_rate_of_link": 0.3},
            })
        };
        let mut served = row("longhaul", 40e6, "completed");
        served["responses"] = json!({
            "before_ms": 20.0, "during_ms": 41.0, "longest_gap_ms": 330.0, "broken_connections": 0,
            "per_second": [
                {"second": -1, "answered": 9, "median_ms": 20.0, "longest_ms": 30.0},
                {"second": 0, "answered": 0, "median_ms": null, "longest_ms": null},
            ],
        });
        let moves = json!([
            served,
            row("longhaul", 60e6, "completed"),
            row("longhaul", 1e6, "failed: it broke"),
            row("qemu-default", 100e6, "completed"),
        ]);
        let figure = json!([
            {"figure": 5, "input": "idle", "system": "cloudnet-blocks", "x": "1", "share": 0.2},
            {"figure": 5, "input": "idle", "system": "cloudnet-blocks", "x": "4", "share": 0.3},
            {"figure": 5, "input": "idle", "system": "longhaul", "x": "whole pages", "share": 0.25},
        ]);
        let moved = |system: &str, strategy: &str, outcome: &str, throughput: f64| {
            json!({
                "system": system, "strategy": strategy, "workload": "ior", "outcome": outcome,
                "link": {"rate_bps": 200_000_000, "rtt_ms": 1.0, "loss": 0.0}, "verify_errors": 0,
                "link_bytes": 250e6, "disk_bytes": 213e6, "total_ms": 12_000.0,
                "downtime_ms": 90.0, "throughput_vs_none": throughput, "lost_s": 2.4,
            })
        };
        let disks = json!([
            moved("longhaul", "hybrid", "completed", 0.8),
            moved("longhaul", "mirror", "completed", 0.5),
            moved("qemu-mirror", "mirror", "failed: late", 0.7),
        ]);
        let strategies = json!([{
            "system": "longhaul", "strategy": "postcopy", "workload": "max_1_4",
            "link": {"rate_bps": 100_000_000, "rtt_ms": 20.0, "loss": 0.0}, "verify_errors": 0,
            "outcome": "completed", "link_bytes": 60e6, "total_ms": 9000.0, "downtime_ms": 140.0,
            "switchover_ms": 90.0, "work_before_per_s": 2000.0, "work_during_per_s": 500.0,
            "work_after_switchover_per_s": 1500.0,
        }]);
        let joined = |system: &str, bps: f64, outcome: &str| {
            json!({
                "system": system, "case": "veth", "outcome": outcome, "version": "1.2",
                "way": "forth", "congestion": "cubic", "throughput_bps": bps, "cpu_s_per_gb": 1.5,
                "latency_us": {"p50": 150.0, "p99": 300.0},
            })
        };
        let networks = json!([
            joined("longhaul", 8e9, "completed"),
            joined("longhaul", 6e9, "completed"),
            {"system": "tinc", "outcome": "skipped: not installed", "version": null, "case": ""},
        ]);
        let (folder, page) = made(&[
            document("network", networks),
            document("disk", disks),
            document("memory", moves),
            document("redundancy", figure),
            document("strategies", strategies),
            document("unheard-of", json!([])),
        ]);
        for expected in [
            "| [memory](#memory) | 2026-01-01 10:00 UTC | 0123456789ab and changes | CPU, 2 \
             cores, Linux 6.1 | 1 of 2 |",
            "| mix, dirtied at 0.3 of the link | longhaul | 2 of 3 | 50 | 2 | 90 | 0 |",
            "| longhaul | 20 | 41 | 330 | 0 |",
            "| ior | 200 Mbit/s, 1 ms | longhaul hybrid | 1 of 1 | 250 | 213 | 12 | 90 | 80.0 % | \
             2.4 | 0 |",
            "| ior | 200 Mbit/s, 1 ms | qemu-mirror | 0 of 1 | 250 | 213 | 12 | 90 | 70.0 % | 2.4 \
             | 0 |",
            "(disk-throughput.svg)",
            "| max_1_4 | 100 Mbit/s, 20 ms | longhaul postcopy | 1 of 1 | 0 | 60 | 9 | 140 | 90 | \
             25.0 % | 75.0 % | 0 |",
            "(strategies-work.svg)",
            "(memory-responses.svg)",
            "| mix | 0.3 | 50.0 % | 0.0 % | 0.0 % |",
            "| `bad.x` | not measured | at least 5 | **no** |",
            "`lab bench memory --json --quick` (fewer cases and repeats than a whole run): \
             [memory.json](documents/memory.json)",
            "| idle, cloudnet-blocks | 20.0 % | 30.0 % |",
            "| longhaul | forth, CUBIC | 7000 | 1.5 | 150 | 300 |",
            "Versions: longhaul: 1.2.",
            "Not measured: tinc: skipped: not installed.",
            "\n\nA note.\n\n## disk\n",
            "## unheard-of",
            "![Bytes over the link, moves that completed](memory-bytes.svg)",
        ] {
            assert!(page.contains(expected), "{expected}\n\n{page}");
        }
        let pictures = files(folder.path(), "svg").unwrap();
        assert_eq!(pictures.len(), 11, "{pictures:?}");
        for picture in pictures {
            let name = picture.file_name().unwrap().to_str().unwrap().to_owned();
            assert!(page.contains(&format!("({name})")), "{name}");
        }
        // Removed notes disappear from the page.
        fs::remove_file(folder.path().join("documents/memory.json")).unwrap();
        make(folder.path()).unwrap();
        assert!(!folder.path().join("memory-bytes.svg").exists());
    }

    #[test]
    fn the_documents_of_benches_that_ran_can_be_read() {
        let document = crate::bench::document::Document::new("codec");
        let (_, page) = made(&[serde_json::to_value(&document).unwrap()]);
        assert!(page.contains("| none to hold |"), "{page}");
    }

    #[test]
    fn without_documents_there_is_no_page() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("documents")).unwrap();
        let error = make(folder.path()).unwrap_err().to_string();
        assert!(error.contains("lab bench NAME --json"), "{error}");
        fs::write(folder.path().join("documents/x.json"), "{}").unwrap();
        let error = make(folder.path()).unwrap_err().to_string();
        assert!(error.contains("x.json"), "{error}");
    }
}
