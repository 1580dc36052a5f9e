//! Replays the inputs of the fuzz target.

#[path = "../../../../fuzz/src/parcel.rs"]
mod parcel;

#[test]
fn inputs_of_the_fuzz_target() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/parcel");
    let mut replayed = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        parcel::run(&std::fs::read(entry.unwrap().path()).unwrap());
        replayed += 1;
    }
    assert!(replayed > 0);
}
