//! Implements `lab demo-parcel`: three guests' disks travel by courier while the guests go on, one
//! of four devices is lost on the way, and the guests then move over a slow link.

use crate::demo::{QEMU, images_in, print, run_shown, spec, tell, title};
use longhaul_api::{Plan as MovePlan, Report};
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{DiskKind, LocalDisk};
use longhaul_lab::guest::{KernelFiles, Tiny};
use longhaul_lab::history::task::{History, Task, description};
use longhaul_lab::history::workload::Work;
use longhaul_lab::lab::{Lab, Plan};
use longhaul_lab::product::{Product, Settings, channel_socket};
use longhaul_protocol::units::{show_bytes, show_duration};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

const LINK: &str = "20mbit,20ms";
const GUESTS: [&str; 3] = ["db-1", "db-2", "db-3"];
const DEVICES: usize = 4;
/// The device that does not arrive.
const LOST: usize = 2;
/// The most that is used of each device.
const DEVICE_LIMIT: &str = "400MiB";
/// The size of the disk that a guest writes to as a database would.
const DATABASE_BYTES: u64 = 32 << 20;
/// The size of the disk with a guest's other content, which does not compress.
const CONTENT_BYTES: u64 = 64 << 20;
const OPERATIONS_PER_S: u64 = 25;
/// Operations before the export, and again after it and after the top-up.
const OPERATIONS: u64 = 300;
const LIMIT: Duration = Duration::from_secs(600);

/// A guest with its disks, and what it writes.
struct Database {
    name: &'static str,
    disks: [LocalDisk; 2],
    history: History,
}

fn task(database: &LocalDisk, seed: u64) -> Task<'_> {
    let work = Work {
        operations_per_s: OPERATIONS_PER_S,
        paced_from: OPERATIONS,
        ..Work::default()
    };
    Task {
        disks: std::slice::from_ref(database),
        seed,
        depth: 4,
        work,
    }
}

/// What one move was predicted to cost without the parcel, and what it did.
struct Row {
    name: &'static str,
    predicted_bytes: Option<u64>,
    predicted_ms: Option<u64>,
    report: Option<Report>,
    is_right: bool,
}

/// Demonstrates parcels on this machine. Exit status 1 where a step failed or a disk was damaged.
///
/// # Errors
/// When the laboratory cannot be made.
pub(crate) fn run() -> Result<ExitCode, LabError> {
    title("Two sites with 20 Mbit/s and 20 ms between them; three guests with databases on lyon")?;
    let link = spec(LINK)?;
    let mut lab = Lab::create(&Plan {
        purpose: "demo: a parcel".to_owned(),
        hosts: 2,
        link,
        seed: 1,
    })?;
    lab.measure_link(link)?;
    let folders: Vec<PathBuf> = lab
        .hosts()
        .iter()
        .map(|it| it.folder().to_owned())
        .collect();
    let home = lab.host(0)?.folder().to_owned();
    let databases = GUESTS
        .iter()
        .zip(1..)
        .map(|(name, seed)| database(name, seed, &home));
    let mut databases = databases.collect::<Result<Vec<_>, _>>()?;
    let disks: Vec<LocalDisk> = databases.iter().flat_map(|it| it.disks.clone()).collect();
    let files = KernelFiles::make_with_history(&home)?;
    let settings = Settings {
        qemus: vec![QEMU.to_owned()],
        accelerator: "auto".to_owned(),
    };
    let images = |host: usize| images_in(folders.get(host).unwrap_or(&home), &disks);
    let product = Product::start_each_with(&mut lab, &files, &settings, images)?;
    for (database, seed) in databases.iter_mut().zip(1..) {
        start(&lab, &product, database, seed)?;
    }
    go_on(&databases)?;
    tell(&format!(
        "each has a disk of {} that it writes as a database would (at random places, with flushes \
         and barriers; every sector can be judged from outside), and one of {} of other content",
        show_bytes(DATABASE_BYTES),
        show_bytes(CONTENT_BYTES)
    ))?;

    title("What the moves would cost over the link alone")?;
    let mut rows = Vec::new();
    for database in &databases {
        let plan: MovePlan = product.ask(0, &["plan", database.name, "--to", "paris"])?;
        let predicted = plan.predictions.first();
        rows.push(Row {
            name: database.name,
            predicted_bytes: predicted.and_then(|it| Some(it.link_bytes?.likely)),
            predicted_ms: predicted.and_then(|it| Some(it.total_ms?.likely)),
            report: None,
            is_right: false,
        });
    }
    let all = rows.iter().filter_map(|row| row.predicted_bytes).sum();
    tell(&format!("predicted: {} for all three", show_bytes(all)))?;

    title("The disks are exported to four devices while the guests run")?;
    let devices = ship(&product, &home, &databases)?;
    let arrived = devices
        .iter()
        .enumerate()
        .filter(|(number, _)| *number != LOST);
    let arrived: Vec<String> = arrived.map(|(_, it)| it.display().to_string()).collect();
    import(&product, &folders, &arrived)?;

    title("The guests move over the link: what has changed, and their memory")?;
    for (database, row) in databases.iter().zip(&mut rows) {
        tell(&format!("$ longhaul migrate {} --to paris", database.name))?;
        let to = lab.host(1)?;
        let moved = product.migrate_shown(0, database.name, to, &[])?;
        if moved.completed() {
            row.report = moved.report.map(|report| *report);
        }
    }
    let words = ["status", "box-7"].map(str::to_owned);
    parcel(&product, 0, &[config(&home), words.to_vec()].concat())?;
    go_on(&databases)?;
    for (database, row) in databases.into_iter().zip(&mut rows) {
        row.is_right = judge(&lab, &product, database)?;
    }
    print(&table(&rows))?;
    let is_right = rows.iter().all(|row| row.is_right && row.report.is_some());
    Ok(ExitCode::from(u8::from(!is_right)))
}

/// Makes a guest's disks.
fn database(name: &'static str, seed: u64, folder: &Path) -> Result<Database, LabError> {
    let kind: DiskKind = "raw".parse().map_err(LabError::Which)?;
    let disk = |part: &str, bytes| {
        let image = format!("{name}-{part}");
        LocalDisk {
            path: folder.join(format!("{image}.raw")),
            image,
            bytes,
            kind,
        }
    };
    let disks = [
        disk("database", DATABASE_BYTES),
        disk("content", CONTENT_BYTES),
    ];
    let [database, content] = &disks;
    database.create()?;
    // Content that nobody else has: it compresses to nothing less.
    let noise = File::open("/dev/urandom").and_then(|source| {
        let mut file = File::create_new(&content.path)?;
        io::copy(&mut source.take(CONTENT_BYTES), &mut file)
    });
    noise.during(|| format!("make the disk {}", content.path.display()))?;
    let history = History::new(&task(database, seed));
    Ok(Database {
        name,
        history,
        disks: disks.clone(),
    })
}

fn start(lab: &Lab, product: &Product, guest: &mut Database, seed: u64) -> Result<(), LabError> {
    for host in lab.hosts() {
        let name = guest.name;
        guest
            .history
            .listen(|channel| channel_socket(host, name, channel))?;
    }
    let tiny = Tiny::calm(guest.name);
    product.start_guest(lab, 0, &description(&tiny, &guest.disks))?;
    let [database, _] = guest.disks.clone();
    guest.history.begin(&task(&database, seed))
}

/// Lets each guest do some more operations.
fn go_on(databases: &[Database]) -> Result<(), LabError> {
    for database in databases {
        let done = database.history.heard().told.done;
        database.history.wait_for(done + OPERATIONS, LIMIT)?;
    }
    Ok(())
}

/// Runs `longhaul parcel` on a host, on this terminal.
fn parcel(product: &Product, host: usize, words: &[String]) -> Result<(), LabError> {
    let shown: Vec<&str> = words.iter().map(String::as_str).collect();
    let without_config = shown.get(2..).unwrap_or_default();
    tell(&format!("$ longhaul parcel {}", without_config.join(" ")))?;
    run_shown(product, host, &[&["parcel"], &shown[..]].concat())
}

/// Returns the option that names a host's configuration.
fn config(folder: &Path) -> Vec<String> {
    let file = folder.join("agent.toml").display().to_string();
    vec!["--config".to_owned(), file]
}

/// Exports the disks, tops the parcel up, and loses a device. Returns all devices.
fn ship(
    product: &Product,
    folder: &Path,
    databases: &[Database],
) -> Result<Vec<PathBuf>, LabError> {
    let devices: Vec<PathBuf> = (0..DEVICES)
        .map(|n| folder.join(format!("usb{n}")))
        .collect();
    let say = |words: &[&str]| {
        let words = words.iter().map(|word| (*word).to_owned());
        parcel(product, 0, &[config(folder), words.collect()].concat())
    };
    say(&["create", "box-7", "--to", "paris", "--lose", "1"])?;
    let guests = databases.iter().map(|it| {
        let images = it.disks.each_ref().map(|disk| disk.image.as_str());
        format!("{}={}", it.name, images.join(","))
    });
    let guests: Vec<String> = guests.collect();
    let guests = guests.iter().map(String::as_str);
    say(&["add", "box-7"]
        .into_iter()
        .chain(guests)
        .collect::<Vec<_>>())?;
    let mut words = config(folder);
    words.extend(["export", "box-7", "--limit", DEVICE_LIMIT].map(str::to_owned));
    for device in &devices {
        fs::create_dir(device).during(|| format!("make {}", device.display()))?;
        words.extend(["--device".to_owned(), device.display().to_string()]);
    }
    parcel(product, 0, &words)?;
    tell("the guests go on, and before the devices leave they are brought up to date")?;
    go_on(databases)?;
    say(&["top-up", "box-7"])?;
    say(&["ship", "box-7", "--courier", "DHL", "--number", "JD 0146"])?;
    title("The courier loses one of the four devices; the guests go on")?;
    if let Some(lost) = devices.get(LOST) {
        fs::remove_dir_all(lost).during(|| format!("remove {}", lost.display()))?;
    }
    go_on(databases)?;
    Ok(devices)
}

/// Verifies and imports what has arrived.
fn import(product: &Product, folders: &[PathBuf], arrived: &[String]) -> Result<(), LabError> {
    let [source, destination] = folders else {
        return Err(LabError::Which("a parcel has two hosts".to_owned()));
    };
    let words = [config(destination), vec!["verify".into()], arrived.to_vec()].concat();
    parcel(product, 1, &words)?;
    let key = source.join("box-7.key");
    let mut command = product.agent(0)?.command()?;
    command
        .arg("parcel")
        .args(config(source))
        .args(["key", "box-7"]);
    let text = longhaul_lab::process::run(&mut command)?;
    fs::write(&key, text).during(|| format!("write {}", key.display()))?;
    let options = [
        "import".into(),
        "--key-file".into(),
        key.display().to_string(),
    ];
    let words = [config(destination), options.to_vec(), arrived.to_vec()].concat();
    parcel(product, 1, &words)?;

    title("The source compares what has arrived with what it has sent")?;
    let reports = destination.join("state/parcel-reports");
    let report = report_in(&reports).during(|| format!("read {}", reports.display()))?;
    let report = report.display().to_string();
    let check = ["check".into(), "box-7".into(), report];
    parcel(product, 0, &[config(source), check.to_vec()].concat())
}

/// Returns the report of the import.
fn report_in(folder: &Path) -> io::Result<PathBuf> {
    let mut entries = fs::read_dir(folder)?;
    let report = entries.next().ok_or(io::ErrorKind::NotFound)?;
    Ok(report?.path())
}

/// Ends a guest on the second host, and judges its database from outside.
fn judge(lab: &Lab, product: &Product, mut database: Database) -> Result<bool, LabError> {
    database.history.stop()?;
    product.stop_guest(1, database.name)?;
    let [_, content] = &database.disks;
    let is_same = same_content(lab, content)?;
    let record = database.history.finish()?;
    let judgement = record.judge(lab.host(1)?.folder())?;
    let is_right = judgement.findings.is_empty() && record.errors == 0;
    tell(&format!(
        "{}: {} operations, {} sectors judged from outside: {}; the other disk is {}",
        database.name,
        record.done,
        judgement.sectors,
        match is_right {
            true => "every one holds what it must".to_owned(),
            false => format!("{} are wrong", judgement.wrong_sectors),
        },
        match is_same {
            true => "as it was",
            false => "damaged",
        }
    ))?;
    Ok(is_right && is_same)
}

/// Compares a disk at the destination with what the source has set aside.
fn same_content(lab: &Lab, disk: &LocalDisk) -> Result<bool, LabError> {
    let name = disk.path.file_name().unwrap_or_default();
    let there = lab.host(1)?.folder().join(name);
    let here = disk
        .path
        .with_file_name(format!("{}.moved", name.to_string_lossy()));
    let read = |path: &Path| fs::read(path).during(|| format!("read {}", path.display()));
    Ok(read(&here)? == read(&there)?)
}

fn table(rows: &[Row]) -> String {
    let bytes = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), show_bytes);
    let time = |ms: Option<u64>| {
        ms.map_or_else(
            || "-".to_owned(),
            |ms| show_duration(Duration::from_millis(ms)),
        )
    };
    let mut text = format!(
        "\n{:<8}{:>24}{:>26}\n{:<8}{:>12}{:>12}{:>13}{:>13}{:>12}\n",
        "",
        "link alone, predicted",
        "after the parcel",
        "",
        "data",
        "time",
        "data",
        "time",
        "downtime"
    );
    for row in rows {
        let report = row.report.as_ref();
        text += &format!(
            "{:<8}{:>12}{:>12}{:>13}{:>13}{:>12}\n",
            row.name,
            bytes(row.predicted_bytes),
            time(row.predicted_ms),
            bytes(report.and_then(|it| it.link_bytes)),
            time(report.and_then(|it| it.total_ms)),
            time(report.and_then(|it| it.downtime_ms).map(|ms| ms as u64)),
        );
    }
    text
}
