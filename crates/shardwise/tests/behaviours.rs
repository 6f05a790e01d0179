//! `docs/behaviours.md` is complete, and every test that it names exists.

use std::path::Path;

/// A row of one of the page's tables.
struct Row {
    section: String,
    id: String,
    held_by: String,
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn rows() -> Vec<Row> {
    let page = std::fs::read_to_string(root().join("docs/behaviours.md")).expect("the page");
    let (mut section, mut rows) = (String::new(), Vec::new());
    for line in page.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.to_string();
        }
        // Nothing on the page needs a bar inside a cell.
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        if let ["", id, what, held_by, ""] = cells[..]
            && id != "id"
            && !id.starts_with('-')
        {
            assert!(!what.is_empty(), "{section}, {id}: what happens?");
            rows.push(Row { section: section.clone(), id: id.into(), held_by: held_by.into() });
        }
    }
    rows
}

fn ids(section: &str) -> Vec<String> {
    let range = |letter: &str, of: &[u32]| of.iter().map(|n| format!("{letter}{n}")).collect::<Vec<_>>();
    let upto = |letter: &str, last: u32| range(letter, &(1..=last).collect::<Vec<_>>());
    match section {
        "Flat parameters" => [upto("F", 8), upto("S", 9), upto("L", 16)].concat(),
        "ZeRO-3" => [upto("I", 9), upto("P", 10), upto("O", 6), upto("Q", 7)].concat(),
        "Reference tests" => {
            let numbers = [
                1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 19, 20, 21, 23, 24, 25, 26, 27, 28, 29,
                30, 31, 32, 34, 36, 37, 38, 39, 40, 41, 42, 43, 45, 46, 52, 53, 54, 55,
            ];
            range("", &numbers)
        }
        "Reported bugs" => [
            range("A", &[1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 16, 18, 19, 20, 21, 22]),
            range("B", &[1, 2, 5, 7, 8, 9, 10, 11, 12, 13]),
            range("C", &[2, 4, 5, 6, 7, 8, 9, 11, 12, 14, 15]),
            range("D", &[1, 2, 4]),
            range("E", &[1, 3, 4, 6, 7]),
            range("F", &[1, 3, 4, 5, 6, 8, 9, 10, 11]),
            range("G", &[2, 3, 4, 5, 6, 7, 9, 10, 11]),
            range("H", &[1, 2, 3, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20]),
            range("I", &[1, 2, 4, 6, 7]),
            range("J", &[1, 3, 4, 5, 6, 7]),
            range("K", &[2, 3, 4, 5, 6, 7, 8]),
            range("L", &[1, 3]),
            upto("M", 5),
            upto("N", 5),
            range("O", &[1, 2, 3, 4, 5, 7]),
        ]
        .concat(),
        other => panic!("a section of the page that no one expects: {other}"),
    }
}

#[test]
fn every_fact_has_one_row() {
    let rows = rows();
    for section in ["Flat parameters", "ZeRO-3", "Reference tests", "Reported bugs"] {
        let got: Vec<&str> = rows.iter().filter(|r| r.section == section).map(|r| r.id.as_str()).collect();
        assert_eq!(got, ids(section), "{section}");
    }
    assert_eq!(rows.len(), 33 + 32 + 43 + 117, "and there is no other row");
}

/// A row names tests, each `file::test` below `crates/`, or says why there is none.
#[test]
fn every_named_test_exists() {
    const REASONS: [&str; 5] =
        ["later: ", "not built: ", "does not apply: ", "cannot be written: ", "held by "];
    let mut named = 0;
    for Row { section, id, held_by } in rows() {
        let tests: Vec<&str> = held_by.split('`').filter(|part| part.contains(".rs::")).collect();
        let has_reason = REASONS.iter().any(|reason| held_by.starts_with(reason));
        assert!(tests.is_empty() == has_reason, "{section}, {id}: tests or a reason, not {held_by:?}");
        for test in tests {
            let (file, name) = test.split_once("::").expect("file::test");
            let path = root().join("crates").join(file);
            let source = std::fs::read_to_string(&path)
                .unwrap_or_else(|error| panic!("{section}, {id}: {}: {error}", path.display()));
            let is_test = source.split("#[test]").skip(1).any(|after| {
                // Whatever stands between the attribute and the function is attributes and comments.
                let function = after.split("fn ").nth(1).unwrap_or_default();
                function.split('(').next() == Some(name)
            });
            assert!(is_test, "{section}, {id}: no test `{name}` in {file}");
            named += 1;
        }
    }
    assert!(named > 200, "the page names {named} tests");
}
