//! Implements `lab bench group`: guests of one base image move at once with their disks, compared
//! with QEMU's own migration of each of them.

use super::super::document::{Document, Sense, median};
use super::super::{Bench, Options};
use super::{ASKED_DOWNTIME_MS, counts, local_images, major_minor, product, systems};
use crate::measure;
use crate::moves::{self, MoveRow, attach, attached, ms};
use crate::peer::mirror::{CopyMode, MirrorMove};
use crate::warm::{self, SystemGuest};
use longhaul_lab::arena::Arena;
use longhaul_lab::error::{During, LabError};
use longhaul_lab::guest::disks::{Cache, DiskKind, Format, LocalDisk};
use longhaul_lab::guest::{CHANNEL_NAME, Chipset, KernelFiles};
use longhaul_lab::installed;
use longhaul_lab::interrupt;
use longhaul_lab::lab::{Lab, Plan, say};
use longhaul_lab::link::spec::LinkSpec;
use longhaul_lab::peer::{Begin, PeerHost, PeerQemu};
use longhaul_lab::product::{Finished, Product, channel_socket};
use longhaul_protocol::guest::GuestDescription;
use serde::Serialize;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The bench's entry of `lab bench --list`.
pub(in crate::bench) const BENCH: Bench = Bench {
    name: "group",
    about: "four guests of one base image move at once with their disks, beside QEMU's default and \
            its mirror for each of them",
    minutes: (45, 13),
    run,
};

const LINK: &str = "200mbit,1ms";
const GUESTS: usize = 4;
/// The guests' workloads, in turns.
const PROGRAMS: [&str; GUESTS] = ["compile", "database", "churn", warm::IDLE];
/// How long they work before they move.
const WORK_FOR: Duration = Duration::from_secs(60);
const QUICK_WORK_FOR: Duration = Duration::from_secs(10);
/// The time limit of a move.
const LIMIT: Duration = Duration::from_secs(900);
/// The time limit of QEMU's move of one guest.
const PEER_LIMIT: Duration = Duration::from_secs(300);
const BOOT_LIMIT: Duration = Duration::from_secs(600);
const CHECK_LIMIT: Duration = Duration::from_secs(1200);
const BYTES_OF_QEMU: f64 = 0.2;
const OURS: &str = "longhaul";
/// The cache mode of the baselines' disks: that of agents.
const KIND: DiskKind = DiskKind {
    format: Format::Raw,
    cache: Cache::None,
    iothread: false,
};

/// The common fields of all benches of moves, summed over the guests; times are from the first
/// command until the last guest runs at the destination, downtimes the longest.
#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    moved: MoveRow<Parameters>,
    /// Bytes that other guests had brought, of memory and disks.
    shared_bytes: Option<u64>,
    of_guests: Vec<OfGuest>,
}

impl Row {
    /// Sums up the known values of all guests.
    fn sum_up(&mut self) {
        let sum = |value: fn(&OfGuest) -> Option<u64>| self.of_guests.iter().map(value).sum();
        self.moved.memory_bytes = sum(|guest| guest.memory_bytes);
        self.moved.disk_bytes = sum(|guest| guest.disk_bytes);
        self.shared_bytes = sum(|guest| guest.shared_bytes);
    }
}

/// The results of one guest's move.
#[derive(Debug, Serialize)]
struct OfGuest {
    workload: &'static str,
    outcome: String,
    /// Unknown where several guests share the link.
    link_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    disk_bytes: Option<u64>,
    /// Bytes of it that other guests had brought.
    shared_bytes: Option<u64>,
    total_ms: f64,
}

#[derive(Debug, Default, Clone, PartialEq, Serialize)]
struct Parameters {
    guests: usize,
    /// Memory of each guest.
    guest_memory_bytes: u64,
    disk_size_bytes: u64,
    /// Allocated size of the base image.
    disk_allocated_bytes: u64,
    works_for_ms: u64,
    machine: String,
}

fn run(options: &Options, document: &mut Document) -> Result<(), LabError> {
    let link = options.link_or(LINK)?;
    let guest = match systems::guest(options)? {
        Some(guest) => guest,
        None => SystemGuest::debian()?,
    };
    let mut lab = Lab::create(&Plan {
        purpose: "bench group".to_owned(),
        hosts: 2,
        link,
        seed: options.seed,
    })?;
    document.add_link(link, lab.measure_link(link)?);
    let files = KernelFiles::make(lab.host(0)?.folder())?;
    let images = local_images(GUESTS * options.repeats() as usize);
    let product = product(
        &mut lab,
        &files,
        (&[], &images),
        (options, toml::Table::new()),
    )?;
    let qemu = installed::qemu(&options.qemu)?;
    let version = installed::qemu_version(&qemu)?;
    let accelerator = if product.has_kvm(0)? { "kvm" } else { "tcg" };
    document.machine_mut().accel = Some(accelerator.to_owned());
    document.machine_mut().qemu = Some(version.clone());
    let chipset = Chipset::named(&options.machine).unwrap_or(Chipset::Q35);
    let group = Group {
        lab: &lab,
        files: &files,
        product: &product,
        qemu,
        accelerator,
        machine: chipset.machine_type(&major_minor(&version)),
        guest,
        link,
        work_for: match options.quick {
            true => QUICK_WORK_FOR,
            false => WORK_FOR,
        },
    };
    let mut rows = Vec::new();
    let mut add = |row: Row, document: &mut Document| {
        document.add_row(&row, &show(&row));
        rows.push(row);
    };
    let peer = CopyMode::Background;
    for repeat in 1..=options.repeats() {
        if options.wants_system(OURS) {
            add(group.at_once(repeat, &images)?, document);
        }
        if options.wants_system(peer.system()) {
            add(group.one_by_one(repeat, peer)?, document);
        }
    }
    judge(&rows, options, document);
    Ok(())
}

struct Group<'a> {
    lab: &'a Lab,
    files: &'a KernelFiles,
    product: &'a Product,
    qemu: PathBuf,
    accelerator: &'static str,
    machine: String,
    guest: SystemGuest,
    link: LinkSpec,
    work_for: Duration,
}

/// A guest at work.
struct Member {
    name: String,
    program: &'static str,
    arena: Arena,
}

impl Member {
    /// Starts its work when it is up.
    fn begin(&mut self, guest: &SystemGuest) -> Result<(), LabError> {
        let name = self.name.clone();
        let silent = |error: longhaul_lab::arena::ArenaError| LabError::Answer {
            what: name.clone(),
            message: error.to_string(),
        };
        self.arena.wait_for_beat(BOOT_LIMIT).map_err(silent)?;
        let started = self.arena.start(guest.arena(), BOOT_LIMIT);
        started.map_err(silent)?;
        if self.program != warm::IDLE {
            let started = self.arena.start_program(self.program, BOOT_LIMIT);
            started.map_err(silent)?;
        }
        Ok(())
    }

    /// Lets it verify all its data, and adds the result and its performance to the row.
    fn judge(&mut self, [began, ended]: [Instant; 2], row: &mut Row) -> Result<(), LabError> {
        let mut verified = moves::verify(&mut self.arena)?;
        if self.program != warm::IDLE {
            verified = verified.and_then(|pages| {
                let (errors, first) = self.arena.check_program(CHECK_LIMIT)?;
                if errors > 0 {
                    say(&format!("{} found {errors} errors: {first}", self.name));
                }
                Ok(pages + errors)
            });
        }
        let row = &mut row.moved;
        match verified {
            Ok(errors) => *row.verify_errors.get_or_insert(0) += errors,
            Err(error) => row.outcome = format!("failed: {}: after the move {error}", self.name),
        }
        let seen = measure::observe(&self.arena.beats(), began, ended);
        let downtimes = [row.downtime_ms, seen.map(|seen| seen.downtime_ms)];
        row.downtime_ms = downtimes.into_iter().flatten().reduce(f64::max);
        Ok(())
    }
}

impl Group<'_> {
    fn row(&self, [system, strategy]: [&str; 2], repeat: u32) -> Result<Row, LabError> {
        let disk = self.guest.disk()?;
        let parameters = Parameters {
            guests: GUESTS,
            guest_memory_bytes: self.description("any").memory_mib << 20,
            disk_size_bytes: disk.len(),
            disk_allocated_bytes: disk.blocks() * 512,
            works_for_ms: self.work_for.as_millis() as u64,
            machine: self.machine.clone(),
        };
        let names = [system, strategy, "mixed"];
        let mut moved = MoveRow::new(names, parameters, self.link, repeat, ASKED_DOWNTIME_MS);
        moved.outcome = "completed".to_owned();
        Ok(Row {
            moved,
            shared_bytes: None,
            of_guests: Vec::new(),
        })
    }

    /// Returns a guest with a disk that only one host has.
    fn description(&self, name: &str) -> GuestDescription {
        let mut description = self.guest.description(name, &self.machine, warm::IDLE);
        description
            .disks
            .iter_mut()
            .for_each(|it| it.shared = false);
        description
    }

    /// Moves them with Longhaul.
    fn at_once(&self, repeat: u32, images: &[String]) -> Result<Row, LabError> {
        let mut row = self.row([OURS, "precopy"], repeat)?;
        let of_repeat = images.iter().skip(GUESTS * (repeat as usize - 1));
        let mut members = Vec::new();
        for (program, image) in PROGRAMS.into_iter().zip(of_repeat) {
            let name = format!("{program}-{repeat}");
            let place = |host: usize| {
                let folder = self.lab.host(host)?.folder();
                Ok::<_, LabError>(folder.join(format!("{image}.img")))
            };
            self.guest.lay_out(&place(0)?)?;
            let mut description = self.description(&name);
            for disk in &mut description.disks {
                disk.image.clone_from(image);
            }
            let channel = |host: usize| {
                let host = self.lab.host(host)?;
                Ok::<_, LabError>(channel_socket(host, &name, CHANNEL_NAME))
            };
            let arena = attached(&channel(0)?)?;
            attach(&arena, &channel(1)?)?;
            self.product.start_guest(self.lab, 0, &description)?;
            let mut member = Member {
                name,
                program,
                arena,
            };
            member.begin(&self.guest)?;
            members.push(member);
        }
        interrupt::sleep(self.work_for)?;
        self.move_all(&mut members, &mut row)?;
        for member in members {
            // Its host depends on how the move went.
            let [here, there] = [0, 1].map(|host| self.product.stop_guest(host, &member.name));
            here.or(there)?;
        }
        for image in images {
            for host in [0, 1] {
                let folder = self.lab.host(host)?.folder();
                remove(&folder.join(format!("{image}.img")))?;
                remove(&folder.join(format!("{image}.img.moved")))?;
            }
        }
        Ok(row)
    }

    fn move_all(&self, members: &mut [Member], row: &mut Row) -> Result<(), LabError> {
        let to = self.lab.host(1)?;
        let link = self.lab.link(0, 1)?;
        let before = link.stats()?;
        let downtime = format!("{ASKED_DOWNTIME_MS}ms");
        let words = ["--disks", "precopy", "--downtime", &downtime];
        let moves: Vec<_> = members
            .iter()
            .map(|member| self.product.migrate(0, &member.name, to, &words))
            .collect::<Result<_, _>>()?;
        let finished: Vec<Finished> = moves
            .into_iter()
            .map(|moving| moving.finish(LIMIT))
            .collect::<Result<_, _>>()?;
        row.moved.note_link(&before, &link.stats()?);
        let began = finished.iter().map(|finished| finished.began).min();
        let ended: Option<Instant> = finished.iter().map(|finished| finished.ended).max();
        row.moved.total_ms = began.zip(ended).map(|(began, ended)| ms(began, ended));
        for (member, finished) in members.iter_mut().zip(&finished) {
            if !finished.completed() {
                row.moved.outcome = format!("failed: {}: {}", member.name, finished.why());
            }
            let report = finished.report.as_ref();
            row.of_guests.push(OfGuest {
                workload: member.program,
                outcome: match finished.completed() {
                    true => "completed".to_owned(),
                    false => format!("failed: {}", finished.why()),
                },
                link_bytes: None,
                memory_bytes: report.and_then(|report| report.memory_bytes),
                disk_bytes: report.and_then(|report| report.disk_bytes),
                shared_bytes: report.and_then(|report| report.bytes.shared_bytes),
                total_ms: ms(finished.began, finished.ended),
            });
            member.judge([finished.began, finished.ended], row)?;
        }
        row.sum_up();
        Ok(())
    }

    /// Moves them with QEMU, one after the other: so each has the whole link, and its writes during
    /// the move are sent again as rarely as possible.
    fn one_by_one(&self, repeat: u32, copy_mode: CopyMode) -> Result<Row, LabError> {
        let mut row = self.row([copy_mode.system(), "mirror"], repeat)?;
        let [mut total_ms, mut bytes, mut back] = [0.0, 0.0, 0.0];
        for program in PROGRAMS {
            self.mirror(program, copy_mode, &mut row)?;
            total_ms += row.moved.total_ms.unwrap_or(f64::NAN);
            bytes += row.moved.link_bytes.map_or(f64::NAN, |bytes| bytes as f64);
            back += row
                .moved
                .link_bytes_back
                .map_or(f64::NAN, |bytes| bytes as f64);
        }
        row.moved.total_ms = Some(total_ms);
        row.moved.link_bytes = Some(bytes as u64);
        row.moved.link_bytes_back = Some(back as u64);
        row.sum_up();
        Ok(row)
    }

    fn mirror(
        &self,
        program: &'static str,
        copy_mode: CopyMode,
        row: &mut Row,
    ) -> Result<(), LabError> {
        let guest = self.description(program);
        let disk_bytes = self.guest.disk()?.len();
        let image = guest.disks.first().map(|disk| disk.image.clone());
        let disk = |host: usize| {
            Ok::<_, LabError>(LocalDisk {
                image: image.clone().unwrap_or_default(),
                path: self.lab.host(host)?.folder().join("peer.img"),
                bytes: disk_bytes,
                kind: KIND,
            })
        };
        let [here, there] = [disk(0)?, disk(1)?];
        remove(&there.path)?;
        self.guest.lay_out(&here.path)?;
        let empty = || format!("make the disk {}", there.path.display());
        let file = File::create_new(&there.path).during(empty)?;
        file.set_len(disk_bytes).during(empty)?;
        let mut source = self.start(0, &guest, &here, Begin::Boot)?;
        let mut destination = self.start(1, &guest, &there, Begin::IncomingStopped)?;
        let mut member = Member {
            name: program.to_owned(),
            program,
            arena: attached(source.channel())?,
        };
        member.begin(&self.guest)?;
        // Commands go to the guest that answers: the running one comes first.
        attach(&member.arena, destination.channel())?;
        interrupt::sleep(self.work_for)?;
        let names: Vec<String> = guest.disks.iter().map(|disk| disk.name.clone()).collect();
        let asked = MirrorMove {
            disks: &names,
            copy_mode,
            destination: self.lab.host(1)?.address(),
            downtime_ms: ASKED_DOWNTIME_MS,
            limit: PEER_LIMIT,
        };
        let link = self.lab.link(0, 1)?;
        let before = link.stats()?;
        let result = asked.run(&mut source, &mut destination)?;
        row.moved.note_link(&before, &link.stats()?);
        row.moved.total_ms = Some(ms(result.began, result.ended));
        row.of_guests.push(OfGuest {
            workload: program,
            outcome: match &result.failure {
                Some(why) => format!("failed: {why}"),
                None => "completed".to_owned(),
            },
            link_bytes: row.moved.link_bytes,
            memory_bytes: result.memory_bytes,
            disk_bytes: result.disk_bytes,
            shared_bytes: None,
            total_ms: ms(result.began, result.ended),
        });
        if let Some(why) = result.failure {
            row.moved.outcome = format!("failed: {program}: {why}");
        }
        member.judge([result.began, result.ended], row)?;
        drop((source, destination));
        remove(&here.path)?;
        remove(&there.path)
    }

    fn start(
        &self,
        host: usize,
        guest: &GuestDescription,
        disk: &LocalDisk,
        begin: Begin<'_>,
    ) -> Result<PeerQemu, LabError> {
        let host = PeerHost {
            host: self.lab.host(host)?,
            qemu: &self.qemu,
            accelerator: self.accelerator,
            files: self.files,
            disks: &[],
            local: std::slice::from_ref(disk),
        };
        PeerQemu::start(&host, guest, begin)
    }
}

fn remove(path: &Path) -> Result<(), LabError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).during(|| format!("remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn judge(rows: &[Row], options: &Options, document: &mut Document) {
    let sound = |row: &&Row| match row.moved.system == OURS {
        true => counts(&row.moved),
        // The bytes that QEMU sent until the move was given up count; errors in its guest do not.
        false => row.moved.verify_errors == Some(0),
    };
    let bytes = |system: &str| {
        let of_system = rows.iter().filter(|row| row.moved.system == system);
        let bytes = of_system
            .filter(sound)
            .filter_map(|row| row.moved.link_bytes);
        median(bytes.map(|bytes| bytes as f64))
    };
    let peer = CopyMode::Background.system();
    if options.wants_system(OURS) && options.wants_system(peer) {
        let value = bytes(OURS).zip(bytes(peer));
        let value = value.map(|(ours, theirs)| ours / theirs);
        document.add_check("bytes_vs_qemu_default", value, Sense::AtMost, BYTES_OF_QEMU);
    }
    let own = rows.iter().filter(|row| row.moved.system == OURS);
    let unsound = own.filter(|row| !sound(row)).count() as f64;
    document.add_check("not_sound.longhaul", Some(unsound), Sense::AtMost, 0.0);
}

fn show(row: &Row) -> String {
    let moved = &row.moved;
    let number = |value: Option<f64>, unit: &str| {
        value.map_or_else(|| "-".to_owned(), |value| format!("{value:.1} {unit}"))
    };
    let mb = |bytes: Option<u64>| number(bytes.map(|bytes| bytes as f64 / 1e6), "MB");
    format!(
        "{:<12} repeat {}: {} guests, {} over the link, memory {}, disks {}, {} in other guests, \
         {}, downtime at most {}, errors {}, {}",
        moved.system,
        moved.repeat,
        moved.parameters.guests,
        mb(moved.link_bytes),
        mb(moved.memory_bytes),
        mb(moved.disk_bytes),
        mb(row.shared_bytes),
        number(moved.total_ms.map(|ms| ms / 1e3), "s"),
        number(moved.downtime_ms, "ms"),
        moved
            .verify_errors
            .map_or_else(|| "-".to_owned(), |errors| errors.to_string()),
        moved.outcome,
    )
}
