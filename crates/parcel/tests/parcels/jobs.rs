//! Exports that are interrupted and go on, and imports.

use crate::stage::{Dice, Stage, disk};
use longhaul_parcel::{
    Device, Disk, Guest, ImportError, Job, JobDisk, JobError, JobGuest, Parcel, Settings, Step,
    import,
};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::Duration;

const MIB: u64 = 1 << 20;

fn settings() -> Settings {
    Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: 1_800_000_000,
    }
}

/// Disks in files, and the guests that have them.
fn guests(stage: &Stage, dice: &mut Dice) -> (Vec<Vec<u8>>, Vec<JobGuest>) {
    let contents: Vec<Vec<u8>> = [70, 3, 40].map(|chunks| disk(dice, chunks)).into();
    let paths = contents.iter().enumerate().map(|(number, content)| {
        let path = stage.path().join(format!("disk-{number}.raw"));
        fs::write(&path, content).unwrap();
        JobDisk {
            name: format!("image-{number}"),
            path,
        }
    });
    let mut paths: Vec<JobDisk> = paths.collect();
    let last = paths.split_off(2);
    let guest = |name: &str, disks| JobGuest {
        name: name.into(),
        disks,
    };
    (contents, vec![guest("web", paths), guest("db", last)])
}

fn is_imported(stage: &Stage, job: &Job, lost: usize, contents: &[Vec<u8>]) {
    let there = job.devices().iter().enumerate();
    let there = there.filter(|(number, _)| *number != lost);
    let devices = there.map(|(_, path)| Device::open(path, false).unwrap());
    let parcel = Parcel::open(devices.collect()).unwrap();
    let out = stage.path().join("out");
    fs::create_dir(&out).unwrap();
    let mut place = |_: &Guest, disk: &Disk| Ok(out.join(&disk.name));
    let imported = import(&parcel, job.key(), None, &mut place).unwrap();
    assert!(imported.report.recovered > 0);
    let disks = imported.disks;
    let named: Vec<(&str, &str)> = disks
        .iter()
        .map(|it| (it.guest.as_str(), it.disk.as_str()))
        .collect();
    assert_eq!(
        named,
        [("web", "image-0"), ("web", "image-1"), ("db", "image-2")]
    );
    for (disk, content) in disks.iter().zip(contents) {
        assert!(fs::read(&disk.path).unwrap() == *content, "{}", disk.disk);
    }
    assert_eq!(fs::read_dir(&out).unwrap().count(), contents.len());
}

#[test]
fn an_export_goes_on_wherever_it_was_interrupted() {
    for seed in 0..6 {
        let mut dice = Dice(seed);
        let stage = Stage::new(3);
        let (contents, guests) = guests(&stage, &mut dice);
        let folder = stage.path().join("jobs/box");
        let devices: Vec<PathBuf> = (0..3).map(|device| stage.folder(device)).collect();
        let limit = Some(120 * MIB);
        let job = Job::create(&folder, &settings(), (&devices, limit), guests).unwrap();
        drop(job);
        let sealed = loop {
            let mut job = Job::open(&folder).unwrap().durable_every(Duration::ZERO);
            let mut steps = 1 + dice.below(6);
            let run = catch_unwind(AssertUnwindSafe(|| {
                let run = job.run(1_800_000_000, &mut |_| {
                    steps -= 1;
                    assert!(steps > 0, "interrupted");
                });
                run.map(drop)
            }));
            if let Ok(ended) = run {
                ended.unwrap();
                break job;
            }
            if dice.below(12) == 0 {
                drop(job);
                let mut job = Job::open(&folder).unwrap();
                job.run(1_800_000_000, &mut |_| ()).unwrap();
                break job;
            }
        };
        assert!(sealed.is_sealed());
        // A sealed one is not written again.
        let written = fs::metadata(&sealed.devices()[0])
            .unwrap()
            .modified()
            .unwrap();
        Job::open(&folder)
            .unwrap()
            .run(1_800_000_000, &mut |_| ())
            .unwrap();
        let now = fs::metadata(&sealed.devices()[0])
            .unwrap()
            .modified()
            .unwrap();
        assert_eq!(written, now);
        is_imported(&stage, &sealed, dice.below(3) as usize, &contents);
    }
}

#[test]
fn a_top_up_has_what_has_changed_and_nothing_else() {
    for seed in 0..6 {
        let mut dice = Dice(seed);
        let stage = Stage::new(3);
        let (mut contents, guests) = guests(&stage, &mut dice);
        let folder = stage.path().join("box");
        let devices: Vec<PathBuf> = (0..3).map(|device| stage.folder(device)).collect();
        let limit = Some(160 * MIB);
        let mut job = Job::create(&folder, &settings(), (&devices, limit), guests.clone()).unwrap();
        assert!(matches!(job.top_up(), Err(JobError::NotSealed(_))));
        job.run(0, &mut |_| ()).unwrap();
        let before = fs::metadata(&job.devices()[0]).unwrap().len();
        // Some chunks change, one disk grows.
        for _ in 0..4 {
            let changed = dice.below(3) as usize;
            let at = dice.below(contents[changed].len() as u64 - 9) as usize;
            let new = dice.bytes(9);
            contents[changed][at..at + 9].copy_from_slice(&new);
        }
        let more = dice.bytes(300_000);
        contents[1].extend(more);
        let disks = guests.iter().flat_map(|guest| &guest.disks);
        for (disk, content) in disks.zip(&contents) {
            fs::write(&disk.path, content).unwrap();
        }
        job.top_up().unwrap();
        drop(job);
        let sealed = loop {
            let mut job = Job::open(&folder).unwrap().durable_every(Duration::ZERO);
            let mut steps = 1 + dice.below(9);
            let run = catch_unwind(AssertUnwindSafe(|| {
                let run = job.run(1_800_000_000, &mut |_| {
                    steps -= 1;
                    assert!(steps > 0, "interrupted");
                });
                run.map(drop)
            }));
            match run {
                Ok(ended) => {
                    ended.unwrap();
                    break job;
                }
                // It must come to an end.
                Err(_) if dice.below(6) == 0 => {
                    drop(job);
                    let mut job = Job::open(&folder).unwrap();
                    job.run(1_800_000_000, &mut |_| ()).unwrap();
                    break job;
                }
                Err(_) => {}
            }
        };
        let after = fs::metadata(&sealed.devices()[0]).unwrap().len();
        let rows = (after - before) / MIB;
        assert!(
            rows < 40,
            "{rows} rows for six chunks and some interruptions"
        );
        is_imported(&stage, &sealed, dice.below(3) as usize, &contents);
    }
}

#[test]
fn an_export_says_how_far_it_is() {
    let stage = Stage::new(2);
    let (contents, guests) = guests(&stage, &mut Dice(1));
    let devices: Vec<PathBuf> = (0..2).map(|device| stage.folder(device)).collect();
    let folder = stage.path().join("box");
    let begin = || {
        Job::create(
            &folder,
            &settings(),
            (&devices, Some(90 * MIB)),
            guests.clone(),
        )
    };
    let mut job = begin().unwrap();
    assert!(matches!(begin(), Err(JobError::Exists(_))));
    let (mut last, mut sealed) = (Vec::new(), 0);
    let mut another = Job::open(&folder).unwrap();
    job.run(0, &mut |step| {
        let busy = another.run(0, &mut |_| ());
        assert!(matches!(busy, Err(JobError::Busy(_))), "two write at once");
        match step {
            Step::Exports { disk, done, all } if done == all => {
                last.push(((*disk).to_owned(), *all))
            }
            Step::Exports { .. } | Step::MomentLost { .. } | Step::NotFrozen { .. } => {}
            Step::Seals { rows, all } => {
                assert!(rows <= all);
                sealed = all - rows;
            }
        }
    })
    .unwrap();
    let expected = contents.iter().enumerate();
    let expected = expected.map(|(n, content)| (format!("image-{n}"), content.len() as u64));
    assert_eq!((last, sealed), (expected.collect(), 0));
}

#[test]
fn a_job_that_cannot_begin_leaves_nothing() {
    let stage = Stage::new(2);
    let (_, mut guests) = guests(&stage, &mut Dice(1));
    let devices: Vec<PathBuf> = (0..2).map(|device| stage.folder(device)).collect();
    let folder = stage.path().join("box");
    let begin = |guests: &[JobGuest], devices: &[PathBuf], parity| {
        let settings = Settings {
            parity,
            ..settings()
        };
        let limit = Some(90 * MIB);
        let begun = Job::create(&folder, &settings, (devices, limit), guests.to_vec());
        assert!(!folder.exists() || begun.is_ok());
        begun
    };
    assert!(
        begin(&guests, &devices, 2).is_err(),
        "no device is left for data"
    );
    let missing = [devices.clone(), vec![stage.path().join("none")]].concat();
    assert!(begin(&guests, &missing, 1).is_err());
    let twice = [guests.clone(), guests.clone()].concat();
    assert!(matches!(
        begin(&twice, &devices, 1),
        Err(JobError::Twice(..))
    ));
    guests[0].disks[0].path = stage.path().join("gone");
    assert!(begin(&guests, &devices, 1).is_err());
    for device in &devices {
        assert_eq!(
            fs::read_dir(device).unwrap().count(),
            0,
            "{}",
            device.display()
        );
    }
}

#[test]
fn an_import_that_fails_leaves_nothing() {
    let stage = Stage::new(2);
    let (_, guests) = guests(&stage, &mut Dice(1));
    let devices: Vec<PathBuf> = (0..2).map(|device| stage.folder(device)).collect();
    let folder = stage.path().join("box");
    let mut job = Job::create(&folder, &settings(), (&devices, Some(90 * MIB)), guests).unwrap();
    let parcel = job.run(0, &mut |_| ()).unwrap();
    for device in 0..2 {
        stage.flip(device, 5 * MIB + 100);
    }
    let out = stage.path().join("out");
    fs::create_dir(&out).unwrap();
    let failed = import(&parcel, job.key(), None, &mut |_, disk| {
        Ok(out.join(&disk.name))
    });
    assert!(matches!(failed, Err(ImportError::Lost(1))), "{failed:?}");
    let mut places = 0;
    let failed = import(&parcel, job.key(), None, &mut |_, disk| {
        places += 1;
        match places {
            1 => Ok(out.join(&disk.name)),
            _ => Err(ImportError::Nothing),
        }
    });
    assert!(matches!(failed, Err(ImportError::Nothing)), "{failed:?}");
    assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
}
