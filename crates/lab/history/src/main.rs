//! Runs in the guest: executes the operations of a history on the guest's disks, reads them back,
//! and reports its progress to the laboratory.
//!
//! It is a workload beside the arena: its argument is the stop file, each line that it prints is a
//! unit of work, and a line `error: ...` reports an error. The data for the judge goes over a
//! virtio-serial port of its own. Reads and writes bypass the guest's page cache (`O_DIRECT`), and
//! a flush is `fdatasync` on the disk: through the cache a write would be acknowledged before any
//! disk has it, and reads would be answered from the guest's memory.

mod disk;
mod pace;
mod port;
mod writer;

use disk::Disk;
use longhaul_history::plan::{FilePasses, Plan};
use longhaul_history::table::Discards;
use pace::{Pace, Paced};
use port::Port;
use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;
use writer::{Settings, Writer};

const LOOK_EVERY: Duration = Duration::from_millis(20);
const REPORT_EVERY: Duration = Duration::from_millis(2);
const DEPTH_MAX: u64 = 32;

fn main() -> ExitCode {
    let Some(stop_file) = std::env::args().nth(1).map(PathBuf::from) else {
        tell(&"error: usage: history STOP-FILE");
        return ExitCode::from(2);
    };
    match run(&stop_file) {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(problem) => {
            tell(&format!("error: {problem}"));
            ExitCode::from(2)
        }
    }
}

/// Works until the file exists; returns the number of errors.
fn run(stop_file: &Path) -> Result<u64, String> {
    let (mut port, start) = loop {
        // A laboratory that gave up waiting is not waited for.
        if stop_file.exists() {
            return Ok(0);
        }
        match Port::start_line() {
            Ok(Some(begun)) => break begun,
            Ok(None) => thread::sleep(LOOK_EVERY),
            Err(error) => return Err(format!("port {}: {error}", port::NAME)),
        }
    };
    let number = |key: &str| port::number(&start, key).unwrap_or(0);
    let disks = open_disks(number("first_disk"), number("disks"))?;
    let (disk_count, strict) = (disks.len(), number("discards_zero"));
    let discards = |disk| match strict >> disk & 1 {
        0 => Discards::ZerosOrKept,
        _ => Discards::Zeros,
    };
    let sectors = disks.iter().map(Disk::sectors).collect();
    let mut plan = Plan::new(number("seed"), sectors);
    if let sectors @ 1.. = number("file_sectors") {
        let file = FilePasses {
            sectors,
            block: number("block_sectors"),
            reads: number("file_reads") != 0,
        };
        plan = plan.and_then(|plan| plan.over_file(file));
    }
    let pace = Pace::new(&Paced {
        operations_per_s: number("operations_per_s"),
        reads_per_s: number("reads_per_s"),
        from: number("paced_from"),
        burst: number("burst"),
        burst_every: Duration::from_millis(number("burst_every_ms")),
    });
    let settings = Settings {
        plan: plan.map_err(|error| error.to_string())?,
        discards: (0..disk_count).map(discards).collect(),
        depth: number("depth").clamp(1, DEPTH_MAX) as usize,
        pace,
        operations: match number("operations") {
            0 => u64::MAX,
            operations => operations,
        },
    };
    let writer = Writer::new(disks, settings);
    thread::scope(|scope| {
        let reporting = scope.spawn(|| report(&writer, &mut port));
        let working = scope.spawn(|| writer.run());
        let mut printed = 0;
        while !working.is_finished() {
            if stop_file.exists() {
                writer.stop();
            }
            printed = print_work(&writer, printed);
            thread::sleep(LOOK_EVERY);
        }
        print_work(&writer, printed);
        let reported = reporting.join();
        let reported = reported.unwrap_or_else(|_| Err(io::Error::other("it panicked")));
        reported.map_err(|error| format!("port {}: {error}", port::NAME))
    })?;
    for error in writer.errors() {
        tell(&format!("error: {error}"));
    }
    Ok(writer.error_count())
}

/// Opens the disks /dev/vda and so on, from a number on.
fn open_disks(first: u64, count: u64) -> Result<Vec<Disk>, String> {
    (first..first + count)
        .map(|number| {
            let letter = u8::try_from(number).ok().filter(|number| *number < 26);
            let letter = letter.ok_or(format!("there is no disk {number}"))?;
            let path = format!("/dev/vd{}", char::from(b'a' + letter));
            Disk::open(Path::new(&path)).map_err(|error| format!("{path}: {error}"))
        })
        .collect()
}

/// Reports news to the laboratory, until everything is reported.
fn report(writer: &Writer<Disk>, port: &mut Port) -> io::Result<()> {
    let mut now = writer.report();
    loop {
        port.send(&now.to_string())?;
        if now.ended {
            return Ok(());
        }
        thread::sleep(REPORT_EVERY);
        now = writer.news(&now);
    }
}

/// Prints a line for each operation since the last time.
fn print_work(writer: &Writer<Disk>, printed: u64) -> u64 {
    let done = writer.report().told.done;
    for number in printed..done {
        tell(&number);
    }
    done
}

/// Prints a line; a failure cannot be reported.
fn tell(line: &dyn fmt::Display) {
    let _ = writeln!(io::stdout(), "{line}");
}
