//! Exports of disks whose writes are tracked: each version is a moment of a guest's disks, and
//! lacks nothing, whatever is interrupted.

use crate::machine::{Agent, Machine, Operation, is_a_moment};
use crate::stage::{Dice, Stage};
use longhaul_parcel::{
    Device, Disk as ParcelDisk, Guest, Job, JobGuest, MomentOf, Parcel, Settings, Step, import,
};
use longhaul_storage::disk::ExportSize;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const DEVICES: usize = 3;

fn create(stage: &Stage, guests: Vec<JobGuest>) -> PathBuf {
    let folder = stage.path().join("box");
    let settings = Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: 7,
    };
    let devices: Vec<PathBuf> = (0..DEVICES).map(|device| stage.folder(device)).collect();
    let limit = Some(200 * MIB);
    Job::create(&folder, &settings, (&devices, limit), guests).unwrap();
    folder
}

/// Returns what is imported without one of the devices, and its version.
fn imported(stage: &Stage, job: &Job, up_to: Option<u64>, dice: &mut Dice) -> (u64, Vec<Vec<u8>>) {
    let lost = dice.below(DEVICES as u64) as usize;
    let there = job.devices().iter().enumerate();
    let there = there.filter(|(number, _)| *number != lost);
    let devices = there.map(|(_, path)| Device::open(path, false).unwrap());
    let parcel = Parcel::open(devices.collect()).unwrap();
    let out = stage.path().join(format!("out-{}", dice.next()));
    fs::create_dir(&out).unwrap();
    let mut place = |_: &Guest, disk: &ParcelDisk| Ok(out.join(&disk.name));
    let disks = import(&parcel, job.key(), up_to, &mut place).unwrap().disks;
    let contents = disks
        .iter()
        .map(|disk| fs::read(&disk.path).unwrap())
        .collect();
    assert_eq!(fs::read_dir(&out).unwrap().count(), disks.len());
    fs::remove_dir_all(&out).unwrap();
    (disks[0].version, contents)
}

/// Runs a job, which is interrupted now and then, while the guest writes.
fn export(folder: &Path, machine: &mut Machine, dice: &mut Dice) -> Job {
    let mut interruptions = dice.below(4);
    loop {
        let job = Job::open(folder).unwrap().durable_every(Duration::ZERO);
        let mut job = job.with_tracking(machine.fronts.clone());
        let mut steps = match interruptions {
            0 => u64::MAX,
            _ => 1 + dice.below(12),
        };
        let run = catch_unwind(AssertUnwindSafe(|| {
            let run = job.run(8, &mut |step| {
                assert!(!matches!(step, Step::MomentLost { .. }), "{step:?}");
                for _ in 0..dice.below(3) {
                    machine.write(dice);
                }
                steps -= 1;
                assert!(steps > 0, "interrupted");
            });
            run.map(drop)
        }));
        match run {
            Ok(ended) => {
                ended.unwrap();
                return job;
            }
            Err(_) => interruptions -= 1,
        }
        for _ in 0..dice.below(3) {
            machine.write(dice);
        }
    }
}

#[test]
fn versions_of_tracked_disks_are_moments_and_lack_nothing() {
    for seed in 0..4 {
        live(seed, false);
    }
}

#[test]
fn guests_of_a_group_have_the_same_moment() {
    for seed in 0..2 {
        live(seed, true);
    }
}

/// The disks are those of one guest, or of the two of a group.
fn live(seed: u64, is_group: bool) {
    let mut dice = Dice(seed);
    let stage = Stage::new(DEVICES);
    let mut machine = Machine::new(&stage, &mut dice);
    let guests = match is_group {
        true => machine.two_guests(),
        false => vec![machine.guest()],
    };
    let folder = create(&stage, guests);
    if is_group {
        let names = ["db".to_owned(), "web".to_owned()];
        let mut job = Job::open(&folder).unwrap();
        job.group("shop", &names).unwrap();
        let error = job.group("shop", &["mail".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("no guest mail"), "{error}");
        assert!(job.group("../shop", &names).is_err());
    }
    machine.is_tracked();
    let mut last = 0;
    let mut versions = Vec::new();
    for _ in 0..3 {
        let begun = machine.operations.len();
        let job = export(&folder, &mut machine, &mut dice);
        let (version, disks) = imported(&stage, &job, None, &mut dice);
        let moment = is_a_moment(&machine, &disks);
        let expected = MomentOf {
            frozen: false,
            group: is_group.then(|| "shop".to_owned()),
        };
        assert_eq!(job.moment_of("web"), Some(expected));
        versions.push((version, disks));
        assert!(
            moment >= begun && moment >= last,
            "{seed}: {last} {begun} {moment}"
        );
        last = moment;
        for _ in 0..dice.below(5) {
            machine.write(&mut dice);
        }
        match dice.below(4) {
            // It is started again, and tracked later: nobody knows what it wrote meanwhile.
            0 => {
                machine.is_not_tracked();
                machine.write(&mut dice);
                machine.is_tracked();
            }
            1 => machine.is_tracked(),
            _ => {}
        }
        Job::open(&folder).unwrap().top_up().unwrap();
    }
    // Each of them can be had later, also while the next one is exported.
    let job = Job::open(&folder).unwrap();
    for (version, disks) in versions {
        let (found, content) = imported(&stage, &job, Some(version), &mut dice);
        assert!(found == version && content == disks, "{seed}: {version}");
    }
}

#[test]
fn a_top_up_reads_only_what_may_have_changed() {
    let mut dice = Dice(1);
    let stage = Stage::new(DEVICES);
    let mut machine = Machine::new(&stage, &mut dice);
    machine.size = ExportSize::OfFile;
    let folder = create(&stage, vec![machine.guest()]);
    machine.is_tracked();
    machine.write(&mut dice);
    let job = Job::open(&folder).unwrap();
    let mut job = job.with_tracking(machine.fronts.clone());
    job.run(8, &mut |_| ()).unwrap();
    // Behind the back of the export: a top-up that reads all of the disk would find it.
    let behind = 20 * MIB;
    let file = OpenOptions::new()
        .write(true)
        .open(&machine.paths[0])
        .unwrap();
    file.write_all_at(&[7; 8], behind).unwrap();
    let elsewhere = Operation {
        places: [8192, 8192],
        reverts: false,
    };
    for (disk, tracked) in machine.disks.iter().enumerate() {
        let number = machine.operations.len() as u64 + 1;
        for (at, bytes) in machine.writes(&elsewhere, number, disk) {
            tracked.write(at, &bytes).unwrap();
        }
    }
    machine.operations.push(elsewhere);
    let top_up = |machine: &Machine| {
        let mut job = Job::open(&folder)
            .unwrap()
            .with_tracking(machine.fronts.clone());
        job.top_up().unwrap();
        job.run(9, &mut |_| ()).unwrap();
        job
    };
    let job = top_up(&machine);
    let (_, disks) = imported(&stage, &job, None, &mut dice);
    let moment = is_a_moment(&machine, &disks);
    assert_eq!(moment, machine.operations.len());
    // In doubt, all of it is compared.
    machine.is_tracked();
    let job = top_up(&machine);
    let (_, disks) = imported(&stage, &job, None, &mut dice);
    assert_eq!(disks[0][behind as usize..behind as usize + 8], [7; 8]);
}

#[test]
fn file_systems_are_frozen_at_the_moment() {
    let mut dice = Dice(2);
    let stage = Stage::new(DEVICES);
    let mut machine = Machine::new(&stage, &mut dice);
    let folder = create(&stage, machine.two_guests());
    let group = ["web", "db"].map(str::to_owned);
    Job::open(&folder).unwrap().group("shop", &group).unwrap();
    let described = serde_json::json!({"name": "web", "vcpus": 2});
    let mut job = Job::open(&folder).unwrap();
    job.describe("web", described.clone()).unwrap();
    let long = job.describe("web", "x".repeat(1 << 20).into());
    assert!(long.is_err());
    machine.is_tracked();
    let good = Agent::default();
    let refuses = Agent {
        refuses: true,
        ..Agent::default()
    };
    let thaws = Agent {
        thaws: true,
        ..Agent::default()
    };
    let agents = [(&good, true, 4), (&refuses, false, 2), (&thaws, false, 4)];
    for (agent, expected, questions) in agents {
        machine.fronts.agent = Some(agent.clone());
        machine.write(&mut dice);
        let job = Job::open(&folder).unwrap();
        let mut job = job.with_tracking(machine.fronts.clone());
        if job.is_sealed() {
            job.top_up().unwrap();
        }
        let mut reasons = 0;
        job.run(9, &mut |step| {
            reasons += usize::from(matches!(step, Step::NotFrozen { .. }))
        })
        .unwrap();
        for guest in &group {
            let moment = job.moment_of(guest).unwrap();
            assert_eq!(
                (moment.frozen, moment.group),
                (expected, Some("shop".into()))
            );
        }
        assert_eq!(reasons, if expected { 0 } else { 2 });
        let asked = agent.asked.lock().unwrap().clone();
        assert_eq!(asked.len(), questions, "{asked:?}");
        // Both are frozen before one is thawed.
        assert!(
            asked[..2].iter().all(|it| it.starts_with("freeze")),
            "{asked:?}"
        );
    }
    // It can be left.
    let job = Job::open(&folder).unwrap().without_freezing();
    let mut job = job.with_tracking(machine.fronts.clone());
    job.top_up().unwrap();
    job.run(9, &mut |_| ()).unwrap();
    assert!(!job.moment_of("web").unwrap().frozen);
    assert_eq!(thaws.asked.lock().unwrap().len(), 4);

    // The import says all of it, of each version.
    let devices = job
        .devices()
        .iter()
        .map(|path| Device::open(path, false).unwrap());
    let parcel = Parcel::open(devices.collect()).unwrap();
    let mut frozen = Vec::new();
    for version in 2..6 {
        let out = stage.path().join(format!("out-{version}"));
        fs::create_dir(&out).unwrap();
        let place = &mut |_: &Guest, disk: &ParcelDisk| Ok(out.join(&disk.name));
        let imported = import(&parcel, job.key(), Some(version), place).unwrap();
        let [web, db] = &imported.guests[..] else {
            panic!("{:?}", imported.guests);
        };
        assert_eq!(
            (&web.description, &db.description),
            (&described, &().into())
        );
        assert!(web.consistent && web.moment.is_some() && web.moment == db.moment);
        assert_eq!((web.version, web.frozen), (version, db.frozen));
        frozen.push(web.frozen);
    }
    assert_eq!(frozen, [true, false, false, false]);
}
