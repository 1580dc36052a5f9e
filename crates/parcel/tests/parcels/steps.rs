//! The steps of a parcel: made, filled, exported, topped up, shipped, confirmed.

use crate::stage::{Dice, Stage, disk};
use longhaul_parcel::{
    Attachment, Date, Device, ImportError, ImportReport, Job, JobDisk, JobError, JobGuest, Parcel,
    Reading, Settings, Shipment, SignedReport, Verdict, import,
};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::Duration;

const MIB: u64 = 1 << 20;
const LIMIT: Option<u64> = Some(90 * MIB);
const NOW: u64 = 1_800_000_000;

fn settings() -> Settings {
    Settings {
        name: "box".into(),
        to: "paris".into(),
        parity: 1,
        now: NOW,
    }
}

/// Writes a guest's disk of that many chunks.
fn guest(stage: &Stage, name: &str, chunks: usize) -> JobGuest {
    let path = stage.path().join(format!("{name}.raw"));
    fs::write(&path, disk(&mut Dice(chunks as u64), chunks)).unwrap();
    JobGuest {
        name: name.into(),
        disks: vec![JobDisk {
            name: format!("{name}-root"),
            path,
        }],
    }
}

fn devices(stage: &Stage) -> Vec<PathBuf> {
    (0..2).map(|device| stage.folder(device)).collect()
}

fn shipment() -> Shipment {
    Shipment {
        courier: "DHL".into(),
        number: "JD 0146".into(),
        date: Date::of(NOW),
        arrives: Some(Date::of(NOW)),
    }
}

fn readings(job: &Job) -> Vec<Reading> {
    let guests = job.status().unwrap().guests;
    guests
        .iter()
        .flat_map(|guest| guest.disks.iter().map(|disk| disk.next))
        .collect()
}

/// Makes and seals a parcel of one guest.
fn sealed(stage: &Stage) -> Job {
    let folder = stage.path().join("job");
    let mut job = Job::make(&folder, &settings()).unwrap();
    job.add(vec![guest(stage, "web", 9)]).unwrap();
    job.begin(&devices(stage), LIMIT, NOW).unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    job
}

fn opened(job: &Job) -> Parcel {
    let devices = job.devices().iter();
    let devices = devices.map(|path| Device::open(path, false).unwrap());
    Parcel::open(devices.collect()).unwrap()
}

/// Imports the parcel, and returns the report.
fn reported(stage: &Stage, job: &Job, out: &str) -> Vec<u8> {
    let parcel = opened(job);
    let out = stage.path().join(out);
    fs::create_dir(&out).unwrap();
    let place = &mut |_: &_, disk: &longhaul_parcel::Disk| Ok(out.join(&disk.name));
    let imported = import(&parcel, job.key(), None, place).unwrap();
    ImportReport::of(&parcel, (&imported.disks, &imported.report), NOW)
        .sign(job.key())
        .unwrap()
}

fn read(report: &[u8]) -> SignedReport {
    SignedReport::read(report).unwrap()
}

#[test]
fn each_step_needs_those_before_it() {
    let stage = Stage::new(2);
    let folder = stage.path().join("job");
    for to in ["", "par\nis", &"p".repeat(101)] {
        let settings = Settings {
            to: to.into(),
            ..settings()
        };
        let made = Job::make(&folder, &settings);
        assert!(matches!(made, Err(JobError::Site(_))) && !folder.exists());
    }
    let mut job = Job::make(&folder, &settings()).unwrap();
    assert!(matches!(
        Job::make(&folder, &settings()),
        Err(JobError::Exists(_))
    ));
    assert_eq!(fs::read_dir(stage.folder(0)).unwrap().count(), 0);
    let begun = job.begin(&devices(&stage), LIMIT, NOW);
    assert!(matches!(begun, Err(JobError::NoGuests(_))));
    assert!(matches!(job.ship(shipment()), Err(JobError::NotSealed(_))));
    assert!(matches!(
        job.cancel_shipment(),
        Err(JobError::NotShipped(_))
    ));

    let web = guest(&stage, "web", 9);
    let bytes = fs::metadata(&web.disks[0].path).unwrap().len();
    job.add(vec![web.clone()]).unwrap();
    // What it has is not added again.
    job.add(vec![web.clone()]).unwrap();
    let mut taken = guest(&stage, "db", 3);
    taken.disks[0].name = "web-root".into();
    assert!(matches!(
        job.add(vec![taken]),
        Err(JobError::Twice("disk", _))
    ));
    let mut gone = web.clone();
    gone.disks[0].name = "web-more".into();
    gone.disks[0].path = stage.path().join("none");
    assert!(matches!(job.add(vec![gone]), Err(JobError::Disk(_))));
    let mut bad = web.clone();
    bad.name = "a/b".into();
    bad.disks[0].name = "other".into();
    assert!(matches!(job.add(vec![bad]), Err(JobError::Record(_))));
    let mut job = Job::open(&folder).unwrap();
    assert_eq!(readings(&job), [Reading::Full { from: 0, bytes }]);

    assert!(matches!(
        job.run(NOW, &mut |_| ()),
        Err(JobError::NoDevices(_))
    ));
    assert!(matches!(
        job.begin(&[], None, NOW),
        Err(JobError::NoDevices(_))
    ));
    let twice = [stage.folder(0), stage.path().join("0/../0")];
    let twice = job.begin(&twice, LIMIT, NOW);
    assert!(matches!(twice, Err(JobError::Twice("device", _))));
    let small = job.begin(&devices(&stage), Some(MIB), NOW);
    assert!(matches!(small, Err(JobError::Device(_))));
    for device in devices(&stage) {
        assert_eq!(fs::read_dir(device).unwrap().count(), 0);
    }
    job.begin(&devices(&stage), LIMIT, NOW).unwrap();
    // They are named once.
    job.begin(&[], None, NOW).unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    let status = job.status().unwrap();
    let compared = Reading::Compare {
        from: 0,
        bytes,
        with: 1,
    };
    assert_eq!(readings(&job), [compared]);
    assert_eq!(
        (status.begun, status.seals.len(), status.sealed),
        (Some(NOW), 1, true)
    );
    for device in &status.devices {
        let Attachment::Attached { parcel, key, .. } = device.attachment else {
            panic!("{device:?}");
        };
        assert_eq!((Some(parcel), key), (status.parcel, status.key));
    }
}

#[test]
fn a_guest_that_is_added_later_travels_in_full_in_the_next_top_up() {
    let stage = Stage::new(2);
    let mut job = sealed(&stage);
    let db = guest(&stage, "db", 5);
    let bytes = fs::metadata(&db.disks[0].path).unwrap().len();
    job.add(vec![db]).unwrap();
    // A disk of a guest that it has, too.
    let mut more = guest(&stage, "more", 2);
    more.name = "web".into();
    job.add(vec![more]).unwrap();
    assert!(matches!(job.ship(shipment()), Err(JobError::Added { .. })));
    assert!(matches!(
        job.run(NOW, &mut |_| ()),
        Err(JobError::Added { .. })
    ));
    let next = readings(&job);
    assert!(
        matches!(next[0], Reading::Compare { with: 1, .. }),
        "{next:?}"
    );
    assert!(matches!(next[1], Reading::Full { .. }), "{next:?}");
    assert_eq!(next[2], Reading::Full { from: 0, bytes });
    let before = fs::metadata(&job.devices()[0]).unwrap().len();
    job.top_up().unwrap();
    job.run(NOW + 5, &mut |_| ()).unwrap();
    let grown = fs::metadata(&job.devices()[0]).unwrap().len() - before;
    assert!(
        grown < 8 * MIB,
        "{grown} bytes for 1.7 MiB, headers and parity"
    );
    let status = job.status().unwrap();
    let last = status.seals.last().unwrap();
    let seal = (last.version, last.time, last.disks.len());
    assert_eq!(seal, (2, NOW + 5, 3));
    job.ship(shipment()).unwrap();
    let checked = job
        .check(&read(&reported(&stage, &job, "out")), NOW)
        .unwrap();
    assert!(checked.confirmed, "{checked:?}");
    for (name, at) in [
        ("web-root", "web"),
        ("more-root", "more"),
        ("db-root", "db"),
    ] {
        let out = fs::read(stage.path().join("out").join(name)).unwrap();
        assert!(
            out == fs::read(stage.path().join(format!("{at}.raw"))).unwrap(),
            "{name}"
        );
    }
    // The first version has neither.
    let parcel = opened(&job);
    let first = stage.path().join("first");
    fs::create_dir(&first).unwrap();
    let place = &mut |_: &_, disk: &longhaul_parcel::Disk| Ok(first.join(&disk.name));
    let disks = import(&parcel, job.key(), Some(1), place).unwrap().disks;
    let [web] = &disks[..] else {
        panic!("{disks:?}");
    };
    assert_eq!((web.disk.as_str(), web.version), ("web-root", 1));
    assert_eq!(fs::read_dir(&first).unwrap().count(), 1);
    let none = import(&parcel, job.key(), Some(0), &mut |_, disk| {
        Ok(first.join(format!("{}-0", disk.name)))
    });
    assert!(matches!(none, Err(ImportError::Later(1))), "{none:?}");
    assert_eq!(fs::read_dir(&first).unwrap().count(), 1);
}

#[test]
fn what_was_interrupted_says_where_it_goes_on() {
    let stage = Stage::new(2);
    let folder = stage.path().join("job");
    let mut job = Job::make(&folder, &settings()).unwrap();
    let guests = vec![guest(&stage, "web", 3), guest(&stage, "db", 40)];
    let bytes = fs::metadata(&guests[1].disks[0].path).unwrap().len();
    job.add(guests).unwrap();
    job.begin(&devices(&stage), LIMIT, NOW).unwrap();
    let mut job = job.durable_every(Duration::ZERO);
    let mut steps = 0;
    let run = catch_unwind(AssertUnwindSafe(|| {
        job.run(NOW, &mut |_| {
            steps += 1;
            assert!(steps < 3, "interrupted");
        })
        .map(drop)
    }));
    assert!(run.is_err());
    let mut job = Job::open(&folder).unwrap();
    let next = readings(&job);
    assert_eq!(next[0], Reading::Done);
    let Reading::Full { from, bytes: rest } = next[1] else {
        panic!("{next:?}");
    };
    assert!(from > 0 && from + rest == bytes, "{next:?}");
    assert!(matches!(job.ship(shipment()), Err(JobError::NotSealed(_))));
    // The guest that is done takes no other disk now; a new guest comes along.
    let mut more = guest(&stage, "more", 2);
    more.name = "web".into();
    assert!(matches!(job.add(vec![more]), Err(JobError::Past { .. })));
    job.add(vec![guest(&stage, "late", 2)]).unwrap();
    // The devices are elsewhere on another day.
    let moved = stage.path().join("usb");
    fs::rename(stage.folder(1), &moved).unwrap();
    assert!(job.run(NOW, &mut |_| ()).is_err());
    let absent = &job.status().unwrap().devices[1].attachment;
    assert!(matches!(absent, Attachment::Absent { .. }), "{absent:?}");
    let elsewhere = Stage::new(1);
    drop(elsewhere.create(&[50], 0).unwrap());
    let other = job.begin(&[elsewhere.folder(0)], None, NOW);
    assert!(
        matches!(other, Err(JobError::OtherDevice { .. })),
        "{other:?}"
    );
    job.begin(std::slice::from_ref(&moved), None, NOW).unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    assert_eq!(job.status().unwrap().seals[0].disks.len(), 3);
    assert!(job.devices()[1].starts_with(moved));
}

#[test]
fn a_beginning_that_was_interrupted_is_repeated() {
    let stage = Stage::new(2);
    let folder = stage.path().join("job");
    // Before its document was there.
    fs::create_dir(&folder).unwrap();
    let mut job = Job::make(&folder, &settings()).unwrap();
    job.add(vec![guest(&stage, "web", 3)]).unwrap();
    let before = fs::read_to_string(folder.join("job.json")).unwrap();
    job.begin(&devices(&stage), LIMIT, NOW).unwrap();
    // After the devices had their first cells, before the job knew it.
    let mut document: serde_json::Value = serde_json::from_str(&before).unwrap();
    document["devices"] = serde_json::to_value(devices(&stage)).unwrap();
    fs::write(folder.join("job.json"), document.to_string()).unwrap();
    let mut job = Job::open(&folder).unwrap();
    job.begin(&[], LIMIT, NOW).unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    assert!(job.is_sealed());

    // What belongs to another parcel of this name is not removed.
    let other = Stage::new(2);
    let folder = other.path().join("job");
    let mut job = Job::make(&folder, &settings()).unwrap();
    job.add(vec![guest(&other, "web", 3)]).unwrap();
    drop(other.create(&[50, 50], 1).unwrap());
    let document = fs::read_to_string(folder.join("job.json")).unwrap();
    let mut document: serde_json::Value = serde_json::from_str(&document).unwrap();
    document["devices"] = serde_json::to_value(devices(&other)).unwrap();
    fs::write(folder.join("job.json"), document.to_string()).unwrap();
    let mut job = Job::open(&folder).unwrap();
    assert!(matches!(
        job.begin(&[], LIMIT, NOW),
        Err(JobError::Device(_))
    ));
    assert!(other.file(0).exists() && other.file(1).exists());
}

#[test]
fn a_parcel_that_has_left_is_not_changed() {
    let stage = Stage::new(2);
    let mut job = sealed(&stage);
    for (courier, number) in [
        ("", "1"),
        ("DHL", " "),
        ("D\nHL", "1"),
        ("DHL", &*"1".repeat(101)),
    ] {
        let shipment = Shipment {
            courier: courier.into(),
            number: number.into(),
            ..shipment()
        };
        assert!(matches!(job.ship(shipment), Err(JobError::Shipment(_))));
    }
    let early = Shipment {
        arrives: Some(Date::of(NOW - 86_400)),
        ..shipment()
    };
    assert!(matches!(job.ship(early), Err(JobError::Shipment(_))));
    job.ship(shipment()).unwrap();
    let mut job = Job::open(&stage.path().join("job")).unwrap();
    assert_eq!(job.status().unwrap().shipped, Some(shipment()));
    let error = job.top_up().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("DHL (JD 0146) took them on 2027-01-15"),
        "{error}"
    );
    assert!(matches!(
        job.run(NOW, &mut |_| ()),
        Err(JobError::Shipped { .. })
    ));
    let added = job.add(vec![guest(&stage, "db", 2)]);
    assert!(matches!(added, Err(JobError::Shipped { .. })));
    assert_eq!(job.cancel_shipment().unwrap(), shipment());
    job.top_up().unwrap();
    assert!(job.tops_up());
    job.run(NOW, &mut |_| ()).unwrap();
    assert!(!job.tops_up());
}

#[test]
fn a_report_confirms_the_last_version_and_no_other() {
    let stage = Stage::new(2);
    let mut job = sealed(&stage);
    let first = reported(&stage, &job, "first");
    // The source goes on, and is topped up.
    let path = stage.path().join("web.raw");
    let mut content = fs::read(&path).unwrap();
    content[70_000] ^= 1;
    fs::write(&path, content).unwrap();
    job.top_up().unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    let checked = job.check(&read(&first), NOW).unwrap();
    assert!(!checked.confirmed && checked.version == 2);
    assert_eq!(checked.disks[0].verdict, Verdict::Older { version: 1 });
    assert!(!job.is_confirmed());

    let second = reported(&stage, &job, "second");
    let verdicts = |job: &mut Job, change: &dyn Fn(&mut ImportReport)| {
        let mut report = read(&second).report;
        change(&mut report);
        let signed = report.sign(job.key()).unwrap();
        let checked = job.check(&read(&signed), NOW).unwrap();
        assert!(!checked.confirmed);
        checked
            .disks
            .iter()
            .map(|it| it.verdict)
            .collect::<Vec<_>>()
    };
    let unknown = verdicts(&mut job, &|report| report.disks[0].bytes += 1);
    assert_eq!(unknown, [Verdict::Unknown]);
    let missing = verdicts(&mut job, &|report| report.disks.clear());
    assert_eq!(missing, [Verdict::Missing]);
    let other = verdicts(&mut job, &|report| report.disks[0].guest = "db".into());
    assert_eq!(other, [Verdict::Unknown, Verdict::Missing]);
    assert!(!Job::open(&stage.path().join("job")).unwrap().is_confirmed());

    // An altered one, one of another key, and one of another parcel are refused.
    let altered = String::from_utf8(second.clone()).unwrap();
    let altered = altered.replace("\"recovered_cells\": 0", "\"recovered_cells\": 1");
    let refused = |job: &mut Job, bytes: &[u8]| {
        let error = job.check(&read(bytes), NOW).unwrap_err();
        assert!(matches!(error, JobError::OtherReport { .. }), "{error}");
    };
    refused(&mut job, altered.as_bytes());
    let report = read(&second).report;
    refused(&mut job, &report.sign(&stage.key).unwrap());
    let other = Stage::new(2);
    let others = sealed(&other);
    refused(&mut job, &reported(&other, &others, "out"));

    let checked = job.check(&read(&second), NOW + 9).unwrap();
    assert!(checked.confirmed, "{checked:?}");
    let mut job = Job::open(&stage.path().join("job")).unwrap();
    let confirmed = job.status().unwrap().confirmed.unwrap();
    assert_eq!((confirmed.version, confirmed.checked), (2, NOW + 9));
    assert!(job.is_confirmed());
    // Another version was not confirmed.
    job.top_up().unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    assert!(!job.is_confirmed());
}

/// Leaves of a document what an earlier program has written.
fn make_old(folder: &Path) {
    let path = folder.join("job.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut document: serde_json::Value = serde_json::from_str(&text).unwrap();
    let keys = document.as_object_mut().unwrap();
    let old = [
        "name", "to", "key", "devices", "guests", "position", "version", "next", "sealed",
    ];
    keys.retain(|key, _| old.contains(&key.as_str()));
    fs::write(&path, document.to_string()).unwrap();
}

#[test]
fn a_job_of_an_earlier_program_goes_on() {
    let stage = Stage::new(2);
    drop(sealed(&stage));
    let folder = stage.path().join("job");
    make_old(&folder);
    let mut job = Job::open(&folder).unwrap();
    let status = job.status().unwrap();
    assert!(status.is_begun && status.sealed && status.created.is_none());
    let checked = job
        .check(&read(&reported(&stage, &job, "out")), NOW)
        .unwrap();
    assert!(checked.confirmed && job.is_confirmed());
    job.top_up().unwrap();
    job.run(NOW, &mut |_| ()).unwrap();
    assert_eq!(job.status().unwrap().seals[0].version, 2);
}

#[test]
fn a_document_that_is_too_long_is_refused() {
    let stage = Stage::new(2);
    let folder = stage.path().join("job");
    drop(Job::make(&folder, &settings()).unwrap());
    let file = fs::OpenOptions::new()
        .write(true)
        .open(folder.join("job.json"));
    file.unwrap().set_len((64 << 20) + 1).unwrap();
    assert!(matches!(Job::open(&folder), Err(JobError::Long(_))));
}
