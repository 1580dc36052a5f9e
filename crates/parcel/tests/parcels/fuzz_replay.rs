//! Replays the inputs of the fuzz targets.

#[path = "../../../../fuzz/src/parcel.rs"]
mod parcel;
#[path = "../../../../fuzz/src/parcel_devices.rs"]
mod parcel_devices;
#[path = "../../../../fuzz/src/parcel_job.rs"]
mod parcel_job;
#[path = "../../../../fuzz/src/replica.rs"]
mod replica;

fn replay(target: &str, mut run: impl FnMut(&[u8])) -> usize {
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds");
    let entries = std::fs::read_dir(format!("{seeds}/{target}")).unwrap();
    let inputs = entries.map(|entry| std::fs::read(entry.unwrap().path()).unwrap());
    inputs.map(|input| run(&input)).count()
}

#[test]
fn inputs_of_the_fuzz_target() {
    assert!(replay("parcel", parcel::run) > 0);
}

#[test]
fn inputs_of_whole_devices() {
    let mut all = [0; 4];
    replay("parcel_devices", |input| {
        let done = parcel_devices::run(input);
        let each = [done.opened, done.read, done.recovered, done.imported];
        for (count, is_done) in all.iter_mut().zip(each) {
            *count += u32::from(is_done);
        }
    });
    std::fs::remove_dir_all(parcel_devices::folder()).unwrap();
    assert!(all.iter().all(|count| *count > 0), "{all:?}");
}

#[test]
fn inputs_of_exports() {
    let mut all = [0; 3];
    replay("parcel_job", |input| {
        let done = parcel_job::run(input);
        let each = [done.opened, done.ran, done.imported];
        for (count, is_done) in all.iter_mut().zip(each) {
            *count += u32::from(is_done);
        }
    });
    std::fs::remove_dir_all(parcel_job::folder()).unwrap();
    assert!(all.iter().all(|count| *count > 0), "{all:?}");
}

#[test]
fn inputs_of_replicas() {
    let mut all = [0; 4];
    replay("replica", |input| {
        let done = replica::run(input);
        let each = [
            done.opened,
            done.took_version,
            done.restored,
            done.restored_damaged,
        ];
        for (count, is_done) in all.iter_mut().zip(each) {
            *count += u32::from(is_done);
        }
    });
    std::fs::remove_dir_all(replica::folder()).unwrap();
    assert!(all.iter().all(|count| *count > 0), "{all:?}");
}
